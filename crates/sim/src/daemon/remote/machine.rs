//! A machine that serves its disk, and may die.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use vellum::{Raw, RawOptions};
use vellum_export::nbd::{Export, Exports, Listener, ServerOptions, Stop, serve};
use vellum_io::executor::Executor;
use vellum_io::{Error, lane};

use super::super::lanes::BackgroundEvents;
use super::super::network::Network;
use super::{PORT, SECTOR_BYTES, SECTORS};
use crate::cut::PowerCut;
use crate::disk::{Disk, Mode};
use crate::rng::Rng;
use crate::schedule::Scheduler;
use crate::sparse_bytes::SparseBytes;
use crate::storage::SimFileOptions;

/// What the machine's lane is called; those of the daemon count from 0.
const LANE: usize = 1000;

/// The other machine.
pub(super) struct Machine {
    pub(super) executor: Executor,
    pub(super) network: Arc<Network>,
    pub(super) disk: RefCell<Arc<Disk>>,
    scheduler: RefCell<Scheduler>,
    rng: RefCell<Rng>,
}

impl BackgroundEvents for Machine {
    fn in_flight(&self) -> bool {
        self.disk.borrow().in_flight() > 0
    }

    fn step(&self) {
        self.disk
            .borrow()
            .complete_one(&mut self.scheduler.borrow_mut());
    }

    fn turn(&self) -> bool {
        lane::set_number(LANE);
        self.executor.enter(|| self.executor.run_batch())
    }
}

impl Machine {
    pub(super) fn new(network: Arc<Network>, seed: u64) -> Rc<Machine> {
        let mut rng = Rng::new(seed);
        let scheduler = Scheduler::new(rng.next_u64());
        let machine = Machine {
            executor: Executor::new(|| {}),
            network,
            disk: RefCell::new(Disk::new(Mode::Scheduled)),
            scheduler: RefCell::new(scheduler),
            rng: RefCell::new(rng),
        };
        machine.plug(SparseBytes::device(SECTORS * SECTOR_BYTES, 0));
        Rc::new(machine)
    }

    pub(super) fn plug(&self, pages: SparseBytes) {
        let disk = Disk::new(Mode::Scheduled);
        drop(disk.add_file(PORT, pages, SimFileOptions::default()));
        self.disk.replace(disk);
    }

    /// Starts the server.
    pub(super) fn start(&self) -> Result<(), Error> {
        let file = self
            .disk
            .borrow()
            .open_again(0, PORT, SimFileOptions::default());
        let device = Raw::open(Arc::new(file), RawOptions::default())?;
        let mut export = Export::new("", device);
        export.multi_conn = true;
        let listener = Listener::simulated(self.network.listen(PORT)?);
        let options = ServerOptions {
            max_connections: 0,
            persistent: true,
            handshake_limit: None,
            lanes: Some(Vec::new()),
            ..ServerOptions::default()
        };
        drop(self.executor.spawn(async move {
            let stop = Stop::new();
            serve(vec![listener], Exports::new([export]), options, &stop).await;
        }));
        Ok(())
    }

    /// Ends everything at once. What is complete stays if only the server dies, and if the
    /// power fails only what is durable must.
    pub(super) fn die(&self, power: bool) {
        if self.rng.borrow_mut().chance(1, 2) {
            self.network.reset(PORT, true);
        }
        self.executor.drop_tasks();
        let disk = self.disk.borrow().clone();
        let point = match power {
            true => disk.cut_point(),
            false => disk.death_point(),
        };
        let cut = PowerCut::random(&point, &mut self.rng.borrow_mut());
        self.plug(cut.apply(&point).swap_remove(0));
    }

    /// What is certain to be there whatever happens.
    pub(super) fn durable(&self) -> SparseBytes {
        let point = self.disk.borrow().cut_point();
        let mut durable = point.durable[0].clone();
        let complete = &point.records[..point.completed];
        for record in complete.iter().filter(|record| record.forced) {
            record.apply(&mut durable);
        }
        durable
    }
}

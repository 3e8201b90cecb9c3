//! Who takes part in a scenario: the disks with their clients, the daemon that serves them,
//! and what is drawn, noted and asked for on the way.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use serde_json::{Map, Value};
use vellum_daemon::Daemon;
use vellum_daemon::qmp::Arguments;
use vellum_export::nbd::Exports;
use vellum_graph::Nodes;
use vellum_graph::live::User;

use crate::failure::{Failure, FailureKind};
use crate::rng::Rng;

use super::events::DaemonEvents;
use super::files::SimFiles;
use super::guest_disk::GuestDisk;
use super::lanes::Lanes;
use super::network::Network;
use super::under_way::UnderWay;

/// What is added to a seed for what is drawn apart.
const APART: u64 = 0xf117_e25b;
/// As [`APART`], for what was added after that.
const LATER: u64 = 0x1a7e_0001;
/// As [`LATER`], for the filters that clients are served through.
const SERVED: u64 = 0x5e1f_e002;

/// Everything.
pub(super) struct Setup {
    pub(super) lanes: Rc<Lanes>,
    pub(super) files: Arc<SimFiles>,
    pub(super) daemon: Rc<Daemon>,
    pub(super) nodes: Nodes,
    /// Clients connect through it; otherwise they call the exports.
    pub(super) network: Option<Arc<Network>>,
    pub(super) exports: Exports,
    pub(super) heard: Rc<DaemonEvents>,
    pub(super) under_way: Rc<UnderWay>,
    pub(super) disks: Vec<Rc<GuestDisk>>,
    /// Requests may fail.
    pub(super) faulty: bool,
    /// Requests that find no room wait.
    pub(super) fills: bool,
    /// No node gathers what is written.
    pub(super) uncached: bool,
    rng: RefCell<Rng>,
    /// For what was added later, and changes nothing else.
    apart: RefCell<Rng>,
    /// For what was added after that, and changes nothing of either.
    later: RefCell<Rng>,
    served: RefCell<Rng>,
    /// Filters stand over disks now and then.
    pub(super) has_filters: bool,
    failure: RefCell<Option<Failure>>,
    /// Commands and requests so far, to tell what led to a failure.
    log: RefCell<Vec<String>>,
}

/// What a setup consists of.
pub(super) struct SetupParts {
    pub(super) lanes: Rc<Lanes>,
    pub(super) files: Arc<SimFiles>,
    pub(super) daemon: Rc<Daemon>,
    pub(super) nodes: Nodes,
    /// Clients connect through it; otherwise they call the exports.
    pub(super) network: Option<Arc<Network>>,
    pub(super) exports: Exports,
    pub(super) disks: Vec<Rc<GuestDisk>>,
    pub(super) faulty: bool,
    /// Requests that find no room wait.
    pub(super) fills: bool,
    pub(super) uncached: bool,
}

impl Setup {
    pub(super) fn new(cast: SetupParts, rng: Rng) -> Rc<Setup> {
        let heard = Rc::new(DaemonEvents::default());
        let mut apart = Rng::new(rng.clone().next_u64().rotate_left(17) ^ APART);
        let later = Rng::new(apart.clone().next_u64().rotate_left(29) ^ LATER);
        let served = Rng::new(later.clone().next_u64().rotate_left(13) ^ SERVED);
        cast.daemon.events.join(heard.clone());
        let under_way = Rc::new(UnderWay::default());
        cast.daemon.events.join(under_way.clone());
        Rc::new(Setup {
            lanes: cast.lanes,
            files: cast.files,
            daemon: cast.daemon,
            nodes: cast.nodes,
            network: cast.network,
            exports: cast.exports,
            heard,
            under_way,
            disks: cast.disks,
            faulty: cast.faulty,
            fills: cast.fills,
            uncached: cast.uncached,
            rng: RefCell::new(rng),
            has_filters: apart.chance(1, 3),
            apart: RefCell::new(apart),
            later: RefCell::new(later),
            served: RefCell::new(served),
            failure: RefCell::default(),
            log: RefCell::default(),
        })
    }

    /// Draws something.
    pub(super) fn draw<T>(&self, draw: impl FnOnce(&mut Rng) -> T) -> T {
        draw(&mut self.rng.borrow_mut())
    }

    /// As [`Setup::draw`], for what was added later.
    pub(super) fn draw_apart<T>(&self, draw: impl FnOnce(&mut Rng) -> T) -> T {
        draw(&mut self.apart.borrow_mut())
    }

    /// As [`Setup::draw_apart`], for what was added after that.
    pub(super) fn draw_later<T>(&self, draw: impl FnOnce(&mut Rng) -> T) -> T {
        draw(&mut self.later.borrow_mut())
    }

    /// As [`Setup::draw_later`], for the filters that clients are served through.
    pub(super) fn draw_served<T>(&self, draw: impl FnOnce(&mut Rng) -> T) -> T {
        draw(&mut self.served.borrow_mut())
    }

    /// Lets others have some turns.
    pub(super) async fn pause(&self) {
        for _ in 0..self.draw(|rng| rng.below(40)) {
            vellum_io::lane::yield_now().await;
        }
    }

    /// Carries a command out, as a client of a monitor asks for it.
    pub(super) async fn ask(&self, command: &str, arguments: Value) -> Result<Value, String> {
        self.note(format!("{command} {arguments}"));
        let _running = self.under_way.begin(command, &arguments);
        let members = match arguments {
            Value::Object(members) => members,
            _ => Map::new(),
        };
        let outcome =
            vellum_daemon::carry_out(&self.daemon, command, Arguments::new(members)).await;
        let outcome = outcome.map_err(|failure| failure.text);
        if let Err(text) = &outcome {
            self.note(format!("{command} failed: {text}"));
        }
        outcome
    }

    /// As [`Setup::ask`], for what must succeed where no request fails; whether it has.
    pub(super) async fn demand(&self, command: &str, arguments: Value) -> bool {
        match self.ask(command, arguments).await {
            Ok(_) => true,
            Err(text) if self.faulty || self.is_in_the_way(&text) => false,
            Err(text) => {
                let message = format!("{command}: {text}");
                self.fail(Failure::new(kind_of(&text), message));
                false
            }
        }
    }

    /// Whether a command may be refused for a filter that clients are served through.
    fn is_in_the_way(&self, refusal: &str) -> bool {
        let filter = |disk: &Rc<GuestDisk>| {
            let filter = disk.served_through.borrow();
            filter.as_ref().is_some_and(|it| it.may_refuse(refusal))
        };
        self.disks.iter().any(filter)
    }

    pub(super) fn note(&self, line: String) {
        self.log.borrow_mut().push(line);
    }

    /// The last things that happened.
    pub(super) fn last_events(&self) -> String {
        let log = self.log.borrow();
        log[log.len().saturating_sub(40)..].join("\n  ")
    }

    /// Notes a failure; the first counts.
    pub(super) fn fail(&self, failure: Failure) {
        self.failure.borrow_mut().get_or_insert(failure);
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.failure.borrow().clone()
    }

    /// Notes which images the clients use, since the exports go with the daemon.
    pub(super) fn remember_tops(&self) {
        for disk in &self.disks {
            self.top(disk);
        }
    }

    /// The node that the clients of a disk use now, or used when this was asked last, which has the name of its
    /// file: while it is opened anew nobody uses it.
    pub(super) fn top(&self, disk: &GuestDisk) -> Option<String> {
        let filter = disk.served_through.borrow();
        let user = match &*filter {
            Some(filter) => User::Node(filter.name.clone()),
            None => User::Export(disk.name.clone()),
        };
        let names = self.files.names();
        let used = names
            .into_keys()
            .find(|name| self.nodes.is_used_by(name, |it| *it == user));
        if used.is_some() {
            disk.last_top.replace(used);
        }
        disk.last_top.borrow().clone()
    }
}

/// The kind of failure that the message of a command or a job tells of.
pub(super) fn kind_of(error: &str) -> FailureKind {
    match error.contains("No space left") {
        true => FailureKind::NoSpace,
        false => FailureKind::Request,
    }
}

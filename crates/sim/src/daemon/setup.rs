//! What there is in a scenario: disks with their clients, and the daemon that serves them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use event_listener::Event;
use serde_json::{Map, Value};
use vellum::BlockDevice;
use vellum_control::Nodes;
use vellum_control::daemon::{self, Daemon, Listener};
use vellum_control::nodes::User;
use vellum_control::qmp::Arguments;
use vellum_export::nbd::Exports;

use super::bitmaps::Pair;
use super::files::{FIXED, SimFiles};
use super::lanes::Lanes;
use super::monitor::kind_of;
use super::network::Network;
use super::series::Series;
use super::under_way::UnderWay;
use crate::failure::Failure;
use crate::model::{LogicalTime, Model};
use crate::rng::Rng;

/// A file that must hold what a disk showed at some moment since `begun`.
#[derive(Debug, Clone)]
pub(super) struct ExpectedFile {
    pub(super) file: String,
    /// The images below it: it shows what they hold.
    pub(super) stands_on: Vec<String>,
    /// As it was when the moment was over.
    pub(super) model: Rc<Model>,
    pub(super) begun: LogicalTime,
    pub(super) what: &'static str,
}

/// A disk that clients use through an export.
pub(super) struct GuestDisk {
    pub(super) name: String,
    pub(super) cluster_size_bytes: u64,
    /// All its images lie in places of their full size.
    pub(super) fixed_images: bool,
    pub(super) model: RefCell<Model>,
    pub(super) kept: RefCell<Vec<ExpectedFile>>,
    pub(super) series: RefCell<Option<Series>>,
    /// What the model knows of bitmaps is about these.
    pub(super) bitmaps: RefCell<Option<Pair>>,
    /// Numbers nodes and jobs.
    next: Cell<u64>,
    /// What clients are connected to; `None` while there is no export.
    pub(super) device: RefCell<Option<Arc<dyn BlockDevice>>>,
    /// Requests that run.
    pub(super) running: Cell<usize>,
    /// Clients that are not done.
    pub(super) clients: Cell<usize>,
    pub(super) changed: Event,
    /// The server hangs up on its clients.
    pub(super) hung_up_on: Cell<bool>,
    /// There will be no export any more: what its clients would wait for has failed.
    is_gone: Cell<bool>,
    /// What clients used before their export went.
    pub(super) last_top: RefCell<Option<String>>,
}

impl GuestDisk {
    pub(super) fn new(
        name: &str,
        size_bytes: u64,
        cluster_size_bytes: u64,
        fixed_images: bool,
    ) -> GuestDisk {
        GuestDisk {
            name: name.to_owned(),
            cluster_size_bytes,
            fixed_images,
            model: RefCell::new(Model::new(size_bytes)),
            kept: RefCell::default(),
            series: RefCell::default(),
            bitmaps: RefCell::default(),
            next: Cell::new(0),
            device: RefCell::default(),
            running: Cell::new(0),
            clients: Cell::new(0),
            changed: Event::new(),
            hung_up_on: Cell::new(false),
            is_gone: Cell::new(false),
            last_top: RefCell::default(),
        }
    }

    /// Whether clients wait in vain for an export.
    pub(super) fn is_gone(&self) -> bool {
        self.is_gone.get()
    }

    /// Has clients wait no longer for an export.
    pub(super) fn give_up(&self) {
        self.is_gone.set(true);
        self.changed.notify(usize::MAX);
    }

    /// A new name for a node, its file, or a job.
    pub(super) fn new_name(&self, kind: &str) -> String {
        self.next.set(self.next.get() + 1);
        let is_image = matches!(kind, "n" | "b" | "c" | "f");
        let mark = if self.fixed_images && is_image {
            FIXED
        } else {
            ""
        };
        format!("{}{kind}{mark}{}", self.name, self.next.get())
    }

    /// Waits until something is so.
    pub(super) async fn until(&self, is_so: impl Fn(&GuestDisk) -> bool) {
        loop {
            let changed = self.changed.listen();
            if is_so(self) {
                return;
            }
            changed.await;
        }
    }

    /// Notes that the first image of a chain must show what the disk has shown at some moment
    /// since `begun`.
    pub(super) fn keep(&self, chain: &[String], begun: LogicalTime, what: &'static str) {
        let kept = ExpectedFile {
            file: chain[0].clone(),
            stands_on: chain[1..].to_vec(),
            model: Rc::new(self.model.borrow().clone()),
            begun,
            what,
        };
        self.kept.borrow_mut().push(kept);
    }

    /// Notes that a file may hold anything from now on.
    pub(super) fn forget(&self, file: &str) {
        let shows = |kept: &ExpectedFile| {
            kept.file == file || kept.stands_on.iter().any(|below| below == file)
        };
        self.kept.borrow_mut().retain(|kept| !shows(kept));
    }
}

/// What the daemon has told.
#[derive(Default)]
pub(super) struct DaemonEvents {
    events: RefCell<Vec<Value>>,
    changed: Event,
}

impl Listener for DaemonEvents {
    fn hear(&self, event: &Value) {
        self.events.borrow_mut().push(event.clone());
        self.changed.notify(usize::MAX);
    }
}

impl DaemonEvents {
    /// Waits for one of some events about a job; gives it.
    pub(super) async fn wait(&self, names: &[&str], job: &str) -> Value {
        loop {
            let changed = self.changed.listen();
            let found = self.events.borrow().iter().find_map(|event| {
                let name = event["event"].as_str().unwrap_or_default();
                let about = event["data"]["device"].as_str() == Some(job);
                (about && names.contains(&name)).then(|| event.clone())
            });
            if let Some(found) = found {
                return found;
            }
            changed.await;
        }
    }
}

/// What is added to a seed for what is drawn apart.
const APART: u64 = 0xf117_e25b;
/// As [`APART`], for what was added after that.
const LATER: u64 = 0x1a7e_0001;

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

    /// Carries a command out, as a client of a monitor asks for it.
    pub(super) async fn ask(&self, command: &str, arguments: Value) -> Result<Value, String> {
        self.note(format!("{command} {arguments}"));
        let _running = self.under_way.begin(command, &arguments);
        let members = match arguments {
            Value::Object(members) => members,
            _ => Map::new(),
        };
        let outcome = daemon::carry_out(&self.daemon, command, Arguments::new(members)).await;
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
            Err(_) if self.faulty => false,
            Err(text) => {
                let message = format!("{command}: {text}");
                self.fail(Failure::new(kind_of(&text), message));
                false
            }
        }
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
            disk.last_top.replace(self.top(disk));
        }
    }

    /// The node that the clients of a disk use now, or used last, which has the name of its
    /// file.
    pub(super) fn top(&self, disk: &GuestDisk) -> Option<String> {
        let export = User::Export(disk.name.clone());
        let names = self.files.names();
        let used = names
            .into_keys()
            .find(|name| self.nodes.is_used_by(name, |user| *user == export));
        used.or_else(|| disk.last_top.borrow().clone())
    }
}

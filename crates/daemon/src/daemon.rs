//! [`Daemon`]: what the monitors, jobs, HTTP and the state file share, and how something is opened or waited for beside other
//! commands. How it starts and ends is in `lifecycle`.
//!
//! Invariant: nothing here knows a command, a job or a client.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use vellum_export::nbd::Stop;
use vellum_graph::live::{NewNode, Nodes};

use crate::askers::Askers;
use crate::chardev::{Chardev, Chardevs};
use crate::daemon_state::DaemonState;
use crate::events::Events;
use crate::jobs::Jobs;
use crate::notices::Notices;
use crate::objects::Objects;
use crate::parts::Parts;
use crate::qmp::Failure;
use crate::server::ServerEnvironment;
use crate::{chains, export, http, space, state};

/// The running daemon.
#[derive(Debug)]
pub struct Daemon {
    /// What there is. Whoever changes it holds it.
    pub parts: Parts,
    pub(crate) jobs: Jobs,
    pub(crate) chardevs: Chardevs,
    /// Those that have not begun yet, and whether their answers take several lines.
    pub(crate) monitors: RefCell<Vec<(Rc<Chardev>, bool)>>,
    /// Tells of what happens.
    pub events: Events,
    /// Somebody wants the program to end.
    pub stop: Stop,
    /// Everything but the monitors has ended.
    pub ended: Stop,
    /// Who waits for what commands do.
    pub(crate) askers: Askers,
    /// Those of `parts`, for whoever cannot wait for these.
    pub(crate) nodes: Nodes,
    /// What a state file is written from.
    pub(crate) state: state::Recorder,
    /// What is counted of its exports, for the same.
    pub(crate) counted: export::CountedExports,
    #[cfg_attr(
        not(feature = "http"),
        allow(dead_code, reason = "only HTTP looks at it")
    )]
    pub(crate) begun: Instant,
    /// What chains may be.
    pub(crate) chains: chains::ChainPolicies,
    /// How long jobs will take is told: they are looked at again and again.
    pub(crate) estimates: Cell<bool>,
    /// Warns of file systems that fill.
    pub(crate) space: space::SpaceWatch,
    /// Where the space of disks was found to go.
    pub(crate) surveys: space::LastSurveys,
    /// Where HTTP is to be served, once that begins.
    pub(crate) doors: RefCell<Vec<http::Bound>>,
}

fn ends() -> Failure {
    Failure::new("The program ends before the node was opened")
}

impl Daemon {
    /// A daemon with these nodes. They can be changed later if they are live.
    pub fn new(nodes: Nodes, environment: ServerEnvironment) -> Rc<Daemon> {
        let events = Events::default();
        let notices = Notices::default();
        let of_node = notices.clone();
        nodes.on_notice(move |notice| of_node.of_node(notice));
        let exports = export::ServerExports::default();
        Rc::new(Daemon {
            counted: exports.counted(),
            begun: Instant::now(),
            chains: chains::ChainPolicies::default(),
            estimates: Cell::new(false),
            space: space::SpaceWatch::default(),
            surveys: space::LastSurveys::default(),
            doors: RefCell::default(),
            nodes: nodes.clone(),
            parts: Parts::new(DaemonState {
                nodes,
                objects: Objects::default(),
                server: None,
                server_options: None,
                exports,
                events: events.clone(),
                notices,
                environment,
            }),
            jobs: Jobs::default(),
            chardevs: Chardevs::default(),
            monitors: RefCell::default(),
            events,
            stop: Stop::new(),
            ended: Stop::new(),
            askers: Askers::default(),
            state: state::Recorder::default(),
        })
    }

    /// Waits for what opens something, which may take as long as a server likes: not when the program
    /// ends, nor for a client that has gone. To be called without the parts.
    pub(crate) async fn open_beside<T, E: Into<Failure>>(
        &self,
        opening: impl Future<Output = Result<T, E>>,
    ) -> Result<T, Failure> {
        let opening = self.stop.or_give_up(opening);
        let Some(opened) = self.askers.or_give_up(opening).await else {
            return Err(Failure::new("Nobody waits for the node any more"));
        };
        opened.ok_or_else(ends)?.map_err(Into::into)
    }

    /// Has everybody find a node that was opened, unless the program ends: nobody would close it.
    /// Whoever calls it holds the parts.
    pub(crate) async fn show(&self, new: NewNode) -> Result<(), Failure> {
        if self.stop.is_requested() {
            let _ = new.discard().await;
            return Err(ends());
        }
        new.show();
        Ok(())
    }

    /// Waits until what some nodes stand on answers, before the parts are held: a server may be silent for as
    /// long as it likes, and whoever asks for something of its disk waits for that; other commands do not.
    pub(crate) async fn wait_for_answers(&self, names: &[String]) -> Result<(), Failure> {
        let answered = self.stop.or_give_up(self.nodes.wait_for_answers(names));
        let Some(answered) = self.askers.or_give_up(answered).await else {
            return Err(Failure::new("Nobody waits for the disk to answer any more"));
        };
        answered.ok_or_else(|| Failure::new("The program ends before the disk has answered"))
    }
}

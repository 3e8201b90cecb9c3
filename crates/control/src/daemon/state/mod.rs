//! `--state FILE`: what there is, so that a daemon that was killed comes back with it.
//!
//! After each command that may have changed something, before it is answered, and when a job ends,
//! what there is is compared with what the file has, and written if it is another. The graph is told
//! as it is ([`Nodes::descriptions`]); what nodes do not know (the arguments of objects, exports and
//! jobs) is noted when the command succeeds.
//!
//! Invariants:
//! - Users of a node go on with another one (a snapshot's overlay, the target of a mirror), or with one that
//!   a client has had opened anew, only when the file says so, and are held up until then: what they write
//!   from then on is found there.
//! - A client is told that something is done when the file has it. A job that has ended while the file could
//!   not be written is an exception: that is in the log, and the file is tried again until it says so.
//! - Nothing is written before everything was brought back, nor once the daemon takes away what there is, but
//!   that a job has ended well, or as its client wanted: it is to come back. A client is told that what it asks for then is lost.

mod anew;
mod content;
mod described;
mod file;
mod keeper;
mod lost;
mod named;
mod restore;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use vellum_io::lane::sleep;
use vellum_io::spawn;
use vellum_jobs::job::Status;

use super::config::Parts;
use super::jobs::Jobs;
use super::{Daemon, DaemonState, Notice};
use crate::Nodes;
use crate::qmp::{Arguments, Failure, Outcome};
use crate::throttle_groups;
use content::Content;
pub(super) use content::ExportPiece;
pub(super) use described::shows_the_same;
use keeper::{Keeper, nameless};
use lost::Lost;
pub use restore::SavedState;

/// Commands that begin jobs which can be begun anew.
const JOBS: [&str; 7] = [
    "block-commit",
    "block-stream",
    "blockdev-backup",
    "blockdev-mirror",
    "drive-backup",
    "drive-mirror",
    "x-vellum-compact",
];

/// What commands begin with that leave what the file has as it is: jobs that they speak to tell of
/// their ends themselves.
const OF_NO_STATE: [&str; 23] = [
    "block-dirty-bitmap-",
    "block-job-cancel",
    "block-job-complete",
    "block-job-dismiss",
    "block-job-finalize",
    "block-latency-",
    "block-set-write-threshold",
    "block_resize",
    "blockdev-create",
    "blockdev-snapshot-delete-internal",
    "blockdev-snapshot-internal",
    "chardev-",
    "job-cancel",
    "job-complete",
    "job-dismiss",
    "job-finalize",
    "qom-get",
    "qom-list",
    "query-",
    "quit",
    "ringbuf-",
    "x-debug-",
    "x-vellum-flush",
];

/// How long after it could not be written the file is tried again, where nobody waits for it.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// What a daemon keeps for the file.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    keeper: RefCell<Option<Arc<Keeper>>>,
    /// The arguments of objects, by name.
    objects: RefCell<BTreeMap<String, Value>>,
    /// The commands of jobs, by id.
    jobs: RefCell<BTreeMap<String, Value>>,
    /// The parts that a configuration has made, and the nodes that they were to have.
    config: RefCell<Arc<str>>,
    /// What is kept for the file that could not be brought back.
    lost: Arc<Mutex<Lost>>,
    /// The end of a job is not in the file, which could not be written.
    is_behind: Cell<bool>,
    /// What there is is being taken away.
    ends: Cell<bool>,
}

/// Whether the file has what there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Recorded {
    InFile,
    /// What there was is being taken away, and is in the file.
    TooLate,
}

/// What a command is to be noted as, if it succeeds.
#[derive(Debug)]
pub(super) struct Noted {
    command: &'static str,
    arguments: Value,
}

impl Recorder {
    /// Has the file stay as it is from now on: whoever holds the parts takes away what there is.
    pub(super) fn end(&self) {
        self.ends.set(true);
    }

    /// Refuses to have users led to a node that the file could not name.
    pub(super) fn check_leading(&self, nodes: &Nodes, to: &str) -> Result<(), Failure> {
        match self.keeper.borrow().is_some() && nodes.is_made_up(to) {
            true => Err(Failure::new(nameless(to))),
            false => Ok(()),
        }
    }

    /// What there is to note of a command; `None` if nothing is kept, or it changes nothing.
    pub(super) fn prepare(&self, command: &'static str, arguments: &Arguments) -> Option<Noted> {
        self.keeper.borrow().as_ref()?;
        if OF_NO_STATE.iter().any(|start| command.starts_with(start)) {
            return None;
        }
        let arguments = arguments.to_value();
        Some(Noted { command, arguments })
    }

    fn note(&self, nodes: &Nodes, command: &str, arguments: &Value) {
        let id = |key: &str| arguments[key].as_str().unwrap_or_default().to_owned();
        match command {
            // What is secret is not written; it has to come from a file, or anew.
            "object-add" if arguments.get("data").is_none() => {
                self.objects
                    .borrow_mut()
                    .insert(id("id"), arguments.clone());
            }
            "object-del" => drop(self.objects.borrow_mut().remove(&id("id"))),
            "transaction" => self.note_transaction(nodes, arguments),
            command if JOBS.contains(&command) => {
                let source = nodes.device(&id("device"));
                let format = source.as_ref().map(|source| source.info().format);
                let job = anew::begun_anew(command, arguments, format.ok());
                self.jobs.borrow_mut().insert(id("job-id"), job);
            }
            _ => {}
        }
    }

    fn note_transaction(&self, nodes: &Nodes, arguments: &Value) {
        let actions = || arguments["actions"].as_array().into_iter().flatten();
        let command = |action: &Value| action["type"].as_str().unwrap_or_default().to_owned();
        let ids = actions().filter(|action| JOBS.contains(&&*command(action)));
        let ids: Vec<&str> = ids
            .filter_map(|action| action["data"]["job-id"].as_str())
            .collect();
        actions().for_each(|action| self.note(nodes, &command(action), &action["data"]));
        if ids.len() > 1 {
            let mut jobs = self.jobs.borrow_mut();
            for id in ids {
                jobs.entry(id.to_owned())
                    .and_modify(|job| job["of-several"] = json!(true));
            }
        }
    }

    /// What there is, but for chains.
    fn describe(&self, keeper: &Keeper, state: &DaemonState, jobs: &Jobs) -> Content {
        let objects = self.objects.borrow();
        let objects = objects.iter().map(|(id, arguments)| {
            match throttle_groups::get(id, throttle_groups::LIMITS) {
                Ok(limits) => {
                    json!({"qom-type": throttle_groups::TYPE, "id": id, "limits": limits})
                }
                Err(_) => arguments.clone(),
            }
        });
        let content = Content {
            objects: objects.collect::<Value>().to_string(),
            server: json!(state.server_options()).to_string(),
            nodes: keeper.described(&state.nodes, None),
            exports: state.exports.describe(&state.nodes),
            jobs: self.describe_jobs(jobs),
            config: self.config.borrow().clone(),
            chains: "[]".to_owned(),
            chains_left: "[]".to_owned(),
            led: state.nodes.leads().describe().to_string(),
        };
        let lost = self.lost.lock();
        if lost.is_empty() {
            return content;
        }
        let mut value = content.to_value();
        lost.add_others(&mut value);
        Content::of_value(&value)
    }

    /// The jobs, as they have been told to go on since they began.
    fn describe_jobs(&self, jobs: &Jobs) -> Vec<Value> {
        let noted = self.jobs.borrow();
        let described = noted.iter().map(|(id, command)| {
            let mut command = command.clone();
            let Some(job) = jobs.find(id) else {
                return command;
            };
            let speed = job.control.speed().get();
            if speed > 0 || command["arguments"].get("speed").is_some() {
                command["arguments"]["speed"] = json!(speed);
            }
            if job.is_write_blocking() {
                command["arguments"]["copy-mode"] = json!("write-blocking");
            }
            if job.is_paused_by_client() {
                command["paused"] = json!(true);
            }
            command
        });
        described.collect()
    }
}

impl Daemon {
    /// Reads a state file; one that is not there is empty. No other daemon keeps it as long as what is
    /// returned is there.
    ///
    /// # Errors
    /// If it cannot be read, is damaged, or another daemon keeps it.
    pub fn read_state(path: &Path) -> Result<SavedState, super::Failure> {
        let place = file::real_path(path).map_err(super::Failure)?;
        let lock = file::lock(&place).map_err(super::Failure)?;
        let content = file::read(&place).map_err(super::Failure)?;
        let saved = SavedState::of(content.unwrap_or_else(|| json!({})));
        let saved = saved.map(|saved| saved.at(place, lock));
        saved.map_err(|why| super::Failure(format!("the state file '{}': {why}", path.display())))
    }

    /// Begins to keep the state file that was read: from now on it says what there is.
    ///
    /// # Errors
    /// If it cannot be written.
    pub async fn keep_state(
        self: &Rc<Self>,
        saved: &SavedState,
        config: &Parts,
    ) -> vellum::Result<()> {
        let keeper = Arc::new(Keeper::new(saved.place(), self.state.lost.clone()));
        self.state.keeper.replace(Some(keeper.clone()));
        // What users are led to is noted in what there is.
        self.note_config(config).await?;
        self.nodes
            .before_going_on(move |nodes, led| keeper.clone().before_going_on(nodes, led));
        Ok(())
    }

    /// Notes which parts are there because a configuration says so.
    ///
    /// # Errors
    /// If the state file cannot be written.
    pub async fn note_config(&self, parts: &Parts) -> vellum::Result<()> {
        let mut names = BTreeSet::new();
        for part in parts.in_order() {
            node_names(&part.arguments, &mut names);
        }
        self.nodes.note_configured(names);
        let noted = parts.in_order().into_iter().map(|part| {
            let node = part.arguments.get("node-name").cloned();
            (part.key.to_string(), node.unwrap_or_default())
        });
        let noted: Map<String, Value> = noted.collect();
        let noted = Value::Object(noted).to_string();
        self.state.config.replace(noted.into());
        self.write_state().await.map(drop)
    }

    /// Has the state file, if there is one, say what there is.
    async fn write_state(&self) -> vellum::Result<Recorded> {
        let keeper = self.state.keeper.borrow().clone();
        let Some(keeper) = keeper else {
            return Ok(Recorded::InFile);
        };
        let parts = self.parts.lock().await;
        if self.state.ends.get() {
            return Ok(Recorded::TooLate);
        }
        let mut content = self.state.describe(&keeper, &parts, &self.jobs);
        let lost = &self.state.lost;
        let (chains, left) = (self.chains.describe(), self.chains.describe_left());
        content.chains = lost.lock().with_chains(chains).to_string();
        content.chains_left = lost.lock().with_chains_left(left).to_string();
        keeper.write(content).await?;
        Ok(Recorded::InFile)
    }

    /// Has the state file say what a command has done, before that is answered.
    pub(super) async fn record(&self, noted: Option<Noted>, outcome: Outcome) -> Outcome {
        let Some(Noted { command, arguments }) = noted else {
            return outcome;
        };
        if outcome.is_ok() {
            self.state.note(&self.nodes, command, &arguments);
            // One of a transaction may be over by now.
            let is_there = |id: &str| {
                let job = self.jobs.find(id);
                job.is_some_and(|job| !matches!(job.status(), Status::Concluded | Status::Null))
            };
            self.state.jobs.borrow_mut().retain(|id, _| is_there(id));
        }
        match (self.write_state().await, outcome) {
            (Err(error), Ok(_)) => Err(Failure::new(format!(
                "This is done, but would be lost with the daemon: {}",
                crate::error_text(&error)
            ))),
            (Ok(Recorded::TooLate), Ok(_)) => Err(Failure::new(
                "This is done, but is lost with the daemon, which ends: ask for it again after its next start",
            )),
            (_, outcome) => outcome,
        }
    }

    /// Has the state file say that a job is over. What the end of the daemon gives up begins anew, and what
    /// `is_over` does not: a backup that has ended well would be of a later moment than its client was told.
    pub(super) async fn record_end(self: &Rc<Self>, job: &str, is_over: bool) {
        self.state.jobs.borrow_mut().remove(job);
        let recorded = match self.write_state().await {
            Ok(Recorded::TooLate) if is_over => self.forget_in_file(job).await,
            recorded => recorded.map(drop),
        };
        if let Err(error) = recorded {
            let why = crate::error_text(&error);
            self.tell(Notice::Error(format!(
                "the job '{job}' is over, and begins anew with the daemon until that can be noted: {why}"
            )))
            .await;
            self.write_later();
        }
    }

    async fn tell(&self, notice: Notice) {
        let tell = self.parts.lock().await.environment.tell;
        tell(notice);
    }

    /// Has the state file, which could not be written, written as soon as it can be: nobody waits for an
    /// answer who could ask again.
    fn write_later(self: &Rc<Self>) {
        if self.state.is_behind.replace(true) {
            return;
        }
        let daemon = self.clone();
        drop(spawn(async move {
            let written = async {
                while daemon.state.is_behind.get() {
                    sleep(RETRY_INTERVAL).await;
                    if daemon.write_state().await.is_ok() {
                        daemon.state.is_behind.set(false);
                    }
                }
            };
            select(pin!(written), pin!(daemon.ended.wait())).await;
        }));
    }

    /// Has the state file say once more what it could not, before what there is is taken away.
    pub(super) async fn write_what_is_behind(&self) {
        if !self.state.is_behind.replace(false) {
            return;
        }
        if let Err(error) = self.write_state().await {
            self.tell(Notice::Error(crate::error_text(&error))).await;
        }
    }

    /// Has the state file say that a job is over, and else what it does.
    async fn forget_in_file(&self, job: &str) -> vellum::Result<()> {
        let keeper = self.state.keeper.borrow().clone();
        let _parts = self.parts.lock().await;
        match keeper {
            Some(keeper) => keeper.forget_job(job).await,
            None => Ok(()),
        }
    }
}

/// The nodes that the arguments of a request name, be it within each other.
fn node_names(members: &Map<String, Value>, names: &mut BTreeSet<String>) {
    let name = members.get("node-name").and_then(Value::as_str);
    names.extend(name.map(str::to_owned));
    for below in members.values().filter_map(Value::as_object) {
        node_names(below, names);
    }
}

/// The members of an object.
fn members(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

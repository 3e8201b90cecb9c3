//! [`Recorder`]: what a daemon keeps for its state file.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};
use vellum_graph::{Nodes, throttle_groups};

use crate::daemon_state::DaemonState;
use crate::jobs::Jobs;
use crate::qmp::{Arguments, Failure};

use super::anew;
use super::content::Content;
use super::keeper::{Keeper, nameless};
use super::lost::Lost;

/// Commands that begin jobs which can be begun anew.
pub(super) const JOBS: [&str; 7] = [
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

/// What a daemon keeps for the file.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    pub(super) keeper: RefCell<Option<Arc<Keeper>>>,
    /// The arguments of objects, by name.
    pub(super) objects: RefCell<BTreeMap<String, Value>>,
    /// The commands of jobs, by id.
    pub(super) jobs: RefCell<BTreeMap<String, Value>>,
    /// The parts that a configuration has made, and the nodes that they were to have.
    pub(super) config: RefCell<Arc<str>>,
    /// What is kept for the file that could not be brought back.
    pub(super) lost: Arc<Mutex<Lost>>,
    /// The end of a job is not in the file, which could not be written.
    pub(super) is_behind: Cell<bool>,
    /// What there is is being taken away.
    pub(super) ends: Cell<bool>,
}

/// Whether the file has what there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Recorded {
    InFile,
    /// What there was is being taken away, and is in the file.
    TooLate,
}

/// What a command is to be noted as, if it succeeds.
#[derive(Debug)]
pub(crate) struct Noted {
    pub(super) command: &'static str,
    pub(super) arguments: Value,
}

impl Recorder {
    /// Has the file stay as it is from now on: whoever holds the parts takes away what there is.
    pub(crate) fn end(&self) {
        self.ends.set(true);
    }

    /// Refuses to have users led to a node that the file could not name.
    pub(crate) fn check_leading(&self, nodes: &Nodes, to: &str) -> Result<(), Failure> {
        match self.keeper.borrow().is_some() && nodes.is_made_up(to) {
            true => Err(Failure::new(nameless(to))),
            false => Ok(()),
        }
    }

    /// What there is to note of a command; `None` if nothing is kept, or it changes nothing.
    pub(crate) fn prepare(&self, command: &'static str, arguments: &Arguments) -> Option<Noted> {
        self.keeper.borrow().as_ref()?;
        if OF_NO_STATE.iter().any(|start| command.starts_with(start)) {
            return None;
        }
        let arguments = arguments.to_value();
        Some(Noted { command, arguments })
    }

    pub(super) fn note(&self, nodes: &Nodes, command: &str, arguments: &Value) {
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
    pub(super) fn describe(&self, keeper: &Keeper, state: &DaemonState, jobs: &Jobs) -> Content {
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

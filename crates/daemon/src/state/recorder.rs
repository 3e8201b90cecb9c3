//! [`Recorder`]: what a daemon keeps for its state file.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};
use vellum_graph::{Nodes, throttle_groups};

use crate::config::PartKind;
use crate::daemon_state::DaemonState;
use crate::jobs::Jobs;
use crate::qmp::Failure;

use super::anew;
use super::content::Content;
use super::keeper::{Keeper, nameless};
use super::lost::Lost;
use super::owner::OfConfig;

/// What a daemon keeps for the file.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    pub(super) keeper: RefCell<Option<Arc<Keeper>>>,
    /// The arguments of clients' objects, by name.
    pub(super) objects: RefCell<BTreeMap<String, Value>>,
    /// The commands of jobs, by id.
    pub(super) jobs: RefCell<BTreeMap<String, Value>>,
    pub(super) config: RefCell<OfConfig>,
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

    /// Notes an object that a client has made.
    pub(crate) fn note_object(&self, words: Value) {
        let id = words["id"].as_str().unwrap_or_default().to_owned();
        self.objects.borrow_mut().insert(id, words);
    }

    pub(crate) fn forget_object(&self, id: &str) {
        self.objects.borrow_mut().remove(id);
    }

    /// Notes the job that a command has begun, or those of a transaction.
    pub(super) fn note(&self, nodes: &Nodes, command: &str, arguments: &Value) {
        if command == "transaction" {
            return self.note_transaction(nodes, arguments);
        }
        let text = |key: &str| arguments[key].as_str().unwrap_or_default();
        let source = nodes.device(text("device"));
        let format = source.as_ref().map(|source| source.info().format);
        let job = anew::begun_anew(command, arguments, format.ok());
        self.jobs
            .borrow_mut()
            .insert(text("job-id").to_owned(), job);
    }

    fn note_transaction(&self, nodes: &Nodes, arguments: &Value) {
        let actions = arguments["actions"].as_array().into_iter().flatten();
        let jobs = actions.filter_map(|action| {
            let command = action["type"].as_str()?;
            command
                .ends_with("-backup")
                .then_some((command, &action["data"]))
        });
        let jobs: Vec<(&str, &Value)> = jobs.collect();
        for (command, data) in &jobs {
            self.note(nodes, command, data);
            if let (true, Some(id)) = (jobs.len() > 1, data["job-id"].as_str()) {
                let mut noted = self.jobs.borrow_mut();
                noted
                    .entry(id.to_owned())
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
        let config = self.config.borrow();
        let is_of_client = !config.has(PartKind::Server, "");
        let server = state.server_options().filter(|_| is_of_client);
        let content = Content {
            objects: objects.collect::<Value>().to_string(),
            server: json!(server).to_string(),
            nodes: keeper.described(&state.nodes, None),
            exports: state.exports.describe(&state.nodes),
            jobs: self.describe_jobs(jobs),
            config: config.text.clone(),
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

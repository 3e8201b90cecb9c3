//! What the daemon is in the middle of: commands that have not been answered, and jobs by how they stand.
//! It says which crashes fell into what, and has some fall into each.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

use serde_json::Value;
use vellum_daemon::Listener;

use crate::rng::Rng;

/// While no command and no job is under way.
pub const IDLE: &str = "nothing";

/// Jobs that a policy begins, whose names nobody has given.
const POLICY: &str = "chain-";

/// Commands and jobs that have begun and not ended.
#[derive(Debug, Default)]
pub(super) struct UnderWay {
    state: RefCell<State>,
}

#[derive(Debug, Default)]
struct State {
    commands: BTreeMap<String, usize>,
    /// What has begun each job, by the job's name.
    begun_by: HashMap<String, String>,
    /// What jobs are doing, by their names.
    jobs: BTreeMap<String, String>,
}

/// A command that is carried out, until this is dropped.
pub(super) struct Running<'a> {
    command: String,
    under_way: &'a UnderWay,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut state = self.under_way.state.borrow_mut();
        if let Some(count) = state.commands.get_mut(&self.command) {
            *count -= 1;
        }
    }
}

impl UnderWay {
    /// Notes that a command has begun.
    pub(super) fn begin(&self, command: &str, arguments: &Value) -> Running<'_> {
        let mut state = self.state.borrow_mut();
        *state.commands.entry(command.to_owned()).or_default() += 1;
        state.note_jobs(command, arguments);
        Running {
            command: command.to_owned(),
            under_way: self,
        }
    }

    /// What there is at this moment, each once.
    pub(super) fn names(&self) -> Vec<String> {
        let state = self.state.borrow();
        let commands = state.commands.iter().filter(|(_, count)| **count > 0);
        let commands = commands.map(|(command, _)| command.clone());
        let mut all: Vec<String> = commands.chain(state.jobs.values().cloned()).collect();
        if all.is_empty() {
            all.push(IDLE.to_owned());
        }
        all.sort_unstable();
        all.dedup();
        all
    }
}

impl State {
    /// Remembers which jobs a command begins.
    fn note_jobs(&mut self, command: &str, arguments: &Value) {
        let Value::Object(members) = arguments else {
            return;
        };
        if let Some(job) = members.get("job-id").and_then(Value::as_str) {
            self.begun_by.insert(job.to_owned(), command.to_owned());
        }
        let actions = members.get("actions").and_then(Value::as_array);
        for action in actions.into_iter().flatten() {
            let kind = action["type"].as_str().unwrap_or_default();
            self.note_jobs(kind, &action["data"]);
        }
    }
}

impl Listener for UnderWay {
    fn hear(&self, event: &Value) {
        if event["event"] != "JOB_STATUS_CHANGE" {
            return;
        }
        let data = &event["data"];
        let (Some(job), Some(status)) = (data["id"].as_str(), data["status"].as_str()) else {
            return;
        };
        let mut state = self.state.borrow_mut();
        if matches!(status, "concluded" | "null") {
            state.jobs.remove(job);
            return;
        }
        let begun_by = match state.begun_by.get(job) {
            Some(command) => command.as_str(),
            None if job.starts_with(POLICY) => "a chain policy",
            None => "another",
        };
        let doing = format!("{begun_by}: {status}");
        state.jobs.insert(job.to_owned(), doing);
    }
}

/// At which steps of a scenario something was under way.
#[derive(Debug, Default)]
pub(super) struct Timetable {
    steps: BTreeMap<String, Vec<u64>>,
}

impl Timetable {
    pub(super) fn note(&mut self, step: u64, under_way: &UnderWay) {
        for name in under_way.names() {
            self.steps.entry(name).or_default().push(step);
        }
    }

    /// A step at which something was under way, each thing being as likely as any other.
    pub(super) fn draw(&self, rng: &mut Rng) -> Option<u64> {
        if self.steps.is_empty() {
            return None;
        }
        let which = rng.below(self.steps.len() as u64) as usize;
        let steps = self.steps.values().nth(which)?;
        Some(*rng.pick(steps))
    }
}

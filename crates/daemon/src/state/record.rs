//! When the state file is written: after commands, when jobs end, and later where it could not be.

use std::collections::BTreeSet;
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select;
use serde_json::{Map, Value, json};
use vellum_io::lane::sleep;
use vellum_io::spawn;
use vellum_jobs::job::Status;

use crate::config::{PartKind, Parts};
use crate::daemon::Daemon;
use crate::qmp::Failure;
use crate::server::Notice;

use super::file;
use super::keeper::Keeper;
use super::owner::OfConfig;
use super::recorder::Recorded;
use super::saved::SavedState;

/// How long after it could not be written the file is tried again, where nobody waits for it.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

impl Daemon {
    /// Reads a state file; one that is not there is empty. No other daemon keeps it as long as what is
    /// returned is there.
    ///
    /// # Errors
    /// If it cannot be read, is damaged, or another daemon keeps it.
    pub fn read_state(path: &Path) -> Result<SavedState, crate::failure::Failure> {
        let place = file::real_path(path).map_err(crate::failure::Failure)?;
        let lock = file::lock(&place).map_err(crate::failure::Failure)?;
        let content = file::read(&place).map_err(crate::failure::Failure)?;
        let saved = SavedState::of(content.unwrap_or_else(|| json!({})));
        let saved = saved.map(|saved| saved.at(place, lock));
        saved.map_err(|why| {
            crate::failure::Failure(format!("the state file '{}': {why}", path.display()))
        })
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
        self.state.config.replace(OfConfig::new(parts));
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
        let is_of_client = |disk: &str| !self.state.config.borrow().has(PartKind::Chain, disk);
        let chains = self.chains.describe(is_of_client);
        content.chains = lost.lock().with_chains(chains).to_string();
        let left = self.chains.describe_left();
        content.chains_left = lost.lock().with_chains_left(left).to_string();
        keeper.write(content).await?;
        Ok(Recorded::InFile)
    }

    /// Has the state file say what a command has done, before that is answered; of one that has begun a `job`, its
    /// name and arguments.
    pub(crate) async fn record<A>(
        &self,
        job: Option<(&str, Value)>,
        outcome: Result<A, Failure>,
    ) -> Result<A, Failure> {
        if outcome.is_ok() {
            if let Some((command, arguments)) = job {
                self.state.note(&self.nodes, command, &arguments);
            }
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
                vellum_options::error_text(&error)
            ))),
            (Ok(Recorded::TooLate), Ok(_)) => Err(Failure::new(
                "This is done, but is lost with the daemon, which ends: ask for it again after its next start",
            )),
            (_, outcome) => outcome,
        }
    }

    /// Has the state file say that a job is over. What the end of the daemon gives up begins anew, and what
    /// `is_over` does not: a backup that has ended well would be of a later moment than its client was told.
    pub(crate) async fn record_end(self: &Rc<Self>, job: &str, is_over: bool) {
        self.state.jobs.borrow_mut().remove(job);
        let recorded = match self.write_state().await {
            Ok(Recorded::TooLate) if is_over => self.forget_in_file(job).await,
            recorded => recorded.map(drop),
        };
        if let Err(error) = recorded {
            let why = vellum_options::error_text(&error);
            self.tell(Notice::Error(format!(
                "the job '{job}' is over, and begins anew with the daemon until that can be noted: {why}"
            )))
            .await;
            self.write_later();
        }
    }

    pub(super) async fn tell(&self, notice: Notice) {
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
    pub(crate) async fn write_what_is_behind(&self) {
        if !self.state.is_behind.replace(false) {
            return;
        }
        if let Err(error) = self.write_state().await {
            self.tell(Notice::Error(vellum_options::error_text(&error)))
                .await;
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

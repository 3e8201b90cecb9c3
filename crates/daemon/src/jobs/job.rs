//! [`Job`]: its state, which commands and its work change, and what is told of it; [`Work`]: what it does.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use event_listener::Event;
use serde_json::{Value, json};
use tracing::trace;
use vellum_jobs::job::{JobCommand, JobControl, Status, Verb};
use vellum_jobs::live::{CopyOutcome, MirrorHandle};

use crate::events::Events;

use super::estimate::Estimate;
use super::kinds;

/// How many pieces of a copy are in flight at once.
pub(super) const PARALLEL: usize = 8;

/// What a job is begun with.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) id: String,
    /// `amend`, `backup`, `commit`, `create`, `mirror`, `stream`, `x-vellum-compact`,
    /// `x-vellum-scrub`.
    pub(crate) kind: &'static str,
    /// Put the result in force without being told to.
    pub(crate) auto_finalize: bool,
    /// Be forgotten without being told to.
    pub(crate) auto_dismiss: bool,
    /// How the filter is called that it puts in front of a node; otherwise it has no name.
    pub(crate) filter: Option<String>,
}

/// A job.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) settings: Settings,
    pub(crate) control: JobControl,
    pub(super) status: Cell<Status>,
    /// Bytes done, and bytes to do.
    pub(super) progress: Cell<(u64, u64)>,
    /// It is to complete: with its result in force, or, if that is not wanted, as it is.
    pub(super) completion: Cell<Option<Completion>>,
    pub(super) finalized: Cell<bool>,
    /// A client has told it to end.
    pub(super) is_unwanted: Cell<bool>,
    /// One of its group puts its result in force: all do.
    pub(super) decided: Cell<bool>,
    /// The node and the name of a bitmap that nobody else may change meanwhile.
    pub(super) bitmap: RefCell<Option<(String, String)>>,
    pub(super) error: RefCell<Option<String>>,
    /// The other jobs of a transaction, of which all succeed or none.
    pub(super) group: RefCell<Vec<Weak<Job>>>,
    /// Whether the requests of its nodes go well: `ok`, `failed`, `nospace`.
    pub(super) io_status: Cell<&'static str>,
    /// What it copies, if users write to that meanwhile.
    pub(super) mirror: RefCell<Option<MirrorHandle>>,
    /// The target had all that the source shows, and writers waited for it.
    pub(super) in_sync: Cell<bool>,
    /// How long users were held up when it ended.
    pub(super) held: Cell<Option<Duration>>,
    /// How it got on in the last seconds.
    pub(super) estimate: RefCell<Estimate>,
    pub(super) events: Events,
    pub(super) changed: Event,
}

/// How a job that is ready ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Completion {
    /// Users go on with the result.
    InForce,
    /// The result is there, and users go on with what they have.
    Apart,
}

/// What a job does. All that it needs of nodes it has before it begins.
pub(crate) trait Work: 'static {
    /// Does it, up to where the result only has to be put in force.
    async fn run(&mut self, job: &Job) -> vellum::Result<CopyOutcome>;

    /// Does what it can beside others, before these wait for the rest of it.
    async fn draw_near(&mut self) -> vellum::Result<()> {
        Ok(())
    }

    /// Puts the result in force.
    async fn conclude(&mut self, job: &Job) -> vellum::Result<()>;

    /// Leaves the nodes, with the result in force or as they were. The devices that it worked
    /// on go before the job_nodes is left: their files stay locked while somebody has them, and a
    /// node that is to be read-only again could not be opened.
    async fn leave(self);
}

impl Job {
    pub(crate) fn status(&self) -> Status {
        self.status.get()
    }

    pub(crate) fn enter(&self, status: Status) {
        let before = self.status.replace(status);
        trace!(
            name: "job_state_transition",
            job = self.settings.id,
            from = before.name(),
            to = status.name()
        );
        self.changed.notify(usize::MAX);
        let data = json!({"status": status.name(), "id": self.settings.id});
        self.events.emit("JOB_STATUS_CHANGE", data);
    }

    /// Why it has failed, once it is over.
    pub(crate) fn failure(&self) -> Option<String> {
        self.error.borrow().clone()
    }

    /// Whether it has the events of block jobs, and is listed among them.
    pub(crate) fn is_block_job(&self) -> bool {
        !matches!(self.settings.kind, kinds::CREATE | kinds::AMEND)
    }

    /// Keeps a bitmap of a node to itself, until it is over.
    pub(crate) fn keep_bitmap(&self, node: &str, name: &str) {
        let bitmap = (node.to_owned(), name.to_owned());
        self.bitmap.replace(Some(bitmap));
    }

    /// Waits until something is so of the job.
    pub(crate) async fn until(&self, is_so: impl Fn(&Job) -> bool) {
        loop {
            let changed = self.changed.listen();
            if is_so(self) {
                return;
            }
            changed.await;
        }
    }

    /// The result is there, and is kept up to date.
    pub(crate) fn become_ready(&self) {
        self.enter(Status::Ready);
        self.events
            .emit("BLOCK_JOB_READY", self.describe_as_event());
        if self.control.command() == JobCommand::Pause {
            self.enter(Status::Standby);
        }
    }

    pub(crate) fn cancel(&self) {
        // What is paused goes on first.
        match self.status() {
            Status::Paused => self.enter(Status::Running),
            Status::Standby => self.enter(Status::Ready),
            _ => {}
        }
        if self.is_paused() {
            // As when it is resumed: what held it up is not tried again.
            self.io_status.set("ok");
        }
        self.control.set(JobCommand::Cancel);
        self.changed.notify(usize::MAX);
    }

    /// Notes that a client has told it to end: however it does, it is not begun anew.
    pub(crate) fn note_unwanted(&self) {
        self.is_unwanted.set(true);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.control.command() == JobCommand::Cancel
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.control.command() == JobCommand::Pause
    }

    /// Whether somebody has paused it: one that a failure has held up may fail again, or go on.
    pub(crate) fn is_paused_by_client(&self) -> bool {
        self.is_paused() && self.io_status.get() == "ok"
    }

    /// What it copies while users write to it.
    pub(crate) fn follow(&self, mirror: MirrorHandle) {
        self.mirror.replace(Some(mirror));
    }

    /// Whether writers wait for copies because somebody asked for that.
    pub(crate) fn is_write_blocking(&self) -> bool {
        let mirror = self.mirror.borrow();
        mirror.as_ref().is_some_and(MirrorHandle::is_write_blocking)
    }

    /// Has writers wait for copies.
    pub(crate) fn block_writes(&self) {
        if let Some(mirror) = &*self.mirror.borrow() {
            mirror.block_writes();
        }
        // What is left is copied now, not with the next write.
        self.changed.notify(usize::MAX);
    }

    pub(crate) fn note_sync(&self, is_in_sync: bool) {
        self.in_sync.set(is_in_sync);
    }

    pub(crate) fn note_hold(&self, held: Duration) {
        self.held.set(Some(held));
    }

    /// Keeps what there was to tell of what it copied.
    pub(super) fn unfollow(&self) {
        self.progress.set(self.progress());
        self.in_sync.set(self.is_in_sync());
        self.mirror.take();
    }

    pub(super) fn progress(&self) -> (u64, u64) {
        match &*self.mirror.borrow() {
            None => self.progress.get(),
            Some(mirror) => {
                let (done_bytes, left_bytes) = mirror.progress();
                (done_bytes, done_bytes + left_bytes)
            }
        }
    }

    pub(super) fn is_in_sync(&self) -> bool {
        let mirror = self.mirror.borrow();
        let holds = |mirror: &MirrorHandle| mirror.is_write_blocking() && mirror.progress().1 == 0;
        self.in_sync.get() && mirror.as_ref().is_none_or(holds)
    }

    pub(crate) fn pause(&self) {
        self.control.set(JobCommand::Pause);
        self.enter(match self.status() {
            Status::Ready => Status::Standby,
            _ => Status::Paused,
        });
    }

    pub(crate) fn resume(&self) {
        self.enter(match self.status() {
            Status::Standby => Status::Ready,
            _ => Status::Running,
        });
        self.io_status.set("ok");
        self.control.set(JobCommand::Run);
    }

    pub(crate) fn complete(&self, completion: Completion) {
        self.completion.set(Some(completion));
        self.changed.notify(usize::MAX);
    }

    pub(crate) fn completion(&self) -> Option<Completion> {
        self.completion.get()
    }

    /// Has it, and all of its group, put their results in force.
    pub(crate) fn finalize(&self) {
        self.finalized.set(true);
        self.changed.notify(usize::MAX);
        for other in self.others() {
            other.finalized.set(true);
            other.changed.notify(usize::MAX);
        }
    }

    /// Whether it, or one of its group, waits for a word before results are put in force.
    pub(super) fn waits_for_word(&self) -> bool {
        let waits = |job: &Job| !job.settings.auto_finalize;
        waits(self) || self.others().iter().any(|other| waits(other))
    }

    /// Whether its result is to be put in force now; those of its group are then, too, whatever
    /// comes.
    pub(super) fn decide(&self) -> bool {
        let others = self.others();
        let is_given_up = self.is_cancelled() || others.iter().any(|other| other.is_cancelled());
        if !self.decided.get() && is_given_up {
            return false;
        }
        self.decided.set(true);
        others.iter().for_each(|other| other.decided.set(true));
        true
    }

    pub(crate) fn set_progress(&self, done_bytes: u64, total_bytes: u64) {
        self.progress.set((done_bytes, total_bytes));
    }

    /// Has some jobs end together: with their results in force, or, if one of them fails, as if
    /// they had been cancelled.
    pub(crate) fn group(jobs: &[&Rc<Job>]) {
        for job in jobs {
            let others = jobs.iter().filter(|other| !Rc::ptr_eq(other, job));
            job.group
                .replace(others.map(|other| Rc::downgrade(other)).collect());
        }
    }

    pub(super) fn others(&self) -> Vec<Rc<Job>> {
        self.group
            .borrow()
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }

    /// Waits until the other jobs of its group are as far.
    pub(super) async fn wait_for_group(&self) {
        for other in self.others() {
            other.changed.notify(usize::MAX);
        }
        let is_there = |other: &Rc<Job>| {
            let status = other.status();
            matches!(
                status,
                Status::Waiting | Status::Pending | Status::Concluded | Status::Null
            )
        };
        self.until(|job| job.is_cancelled() || job.others().iter().all(is_there))
            .await;
    }

    /// Gives up the others of its group: it has failed.
    pub(super) fn cancel_group(&self) {
        for other in self.group.take().iter().filter_map(Weak::upgrade) {
            if other.status().accepts(Verb::Cancel) || other.status() == Status::Waiting {
                other.cancel();
            }
        }
    }

    /// What its events tell.
    pub(super) fn describe_as_event(&self) -> Value {
        let (offset, len) = self.progress();
        json!({
            "type": self.settings.kind,
            "device": self.settings.id,
            "len": len,
            "offset": offset,
            "speed": self.control.speed().get(),
        })
    }

    /// The job as `query-jobs` describes it.
    pub(crate) fn describe(&self) -> Value {
        let (done, total) = self.progress();
        let mut described = json!({
            "id": self.settings.id,
            "type": self.settings.kind,
            "status": self.status().name(),
            "current-progress": done,
            "total-progress": total,
        });
        self.describe_estimate(&mut described);
        if let Some(error) = &*self.error.borrow() {
            described["error"] = json!(error);
        }
        described
    }

    /// The job as `query-block-jobs` describes it.
    pub(crate) fn describe_block_job(&self) -> Value {
        let mut described = self.describe_as_event();
        let status = self.status();
        // Users of what was copied are held up while it is pending in QEMU, and so is the job.
        let is_held = status == Status::Pending && self.mirror.borrow().is_some();
        let paused = matches!(status, Status::Paused | Status::Standby) || is_held;
        described["busy"] = json!(status == Status::Running);
        described["paused"] = json!(paused);
        described["ready"] = json!(matches!(status, Status::Ready | Status::Standby));
        described["io-status"] = json!(self.io_status.get());
        described["status"] = json!(status.name());
        described["auto-finalize"] = json!(self.settings.auto_finalize);
        described["auto-dismiss"] = json!(self.settings.auto_dismiss);
        if self.settings.kind == kinds::MIRROR {
            described["actively-synced"] = json!(self.is_in_sync());
        }
        self.describe_estimate(&mut described);
        if let Some(held) = self.held.get() {
            described["x-vellum-held-ms"] = json!(held.as_secs_f64() * 1e3);
        }
        if let Some(error) = &*self.error.borrow() {
            described["error"] = json!(error);
        }
        described
    }
}

//! Jobs: what is being done to nodes in the background, from the command that begins it to
//! the one that dismisses it.
//!
//! A job goes through the states of [`vellum_jobs::job::Status`]; every change of state is
//! an event. What it does is a [`Work`].
//!
//! Invariant: the graph is changed by a job only while it holds [`Daemon::parts`], so no
//! command meets a change half made.

pub(super) mod active_commit;
pub(super) mod amend;
pub(super) mod backup;
pub(super) mod commit;
pub(super) mod compact;
pub(super) mod create;
mod estimate;
pub(super) mod failures;
pub(super) mod fleece;
mod job_nodes;
pub(super) mod mirror;
pub(super) mod mirroring;
mod progress;
pub(super) mod scrub;
#[cfg_attr(
    not(feature = "http"),
    allow(dead_code, reason = "only HTTP looks at it")
)]
mod state;
pub(super) mod stream;

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::time::Duration;

use event_listener::Event;
use futures_util::future::{Either, select};
use serde_json::{Value, json};
use tracing::trace;
use vellum_io::spawn;
use vellum_jobs::job::{JobCommand, JobControl, Status, Verb};
use vellum_jobs::live::{CopyOutcome, MirrorHandle};

use super::Daemon;
use super::events::Events;
use crate::{error_text, qmp};
use estimate::Estimate;
pub(super) use job_nodes::JobNodes;
use progress::ProgressReporter;
#[cfg_attr(
    not(feature = "http"),
    allow(unused_imports, reason = "only HTTP looks at it")
)]
pub(super) use state::JobState;

/// How many pieces of a copy are in flight at once.
const PARALLEL: usize = 8;

/// What a job is begun with.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) id: String,
    /// `amend`, `backup`, `commit`, `create`, `mirror`, `stream`, `x-vellum-compact`,
    /// `x-vellum-scrub`.
    pub(super) kind: &'static str,
    /// Put the result in force without being told to.
    pub(super) auto_finalize: bool,
    /// Be forgotten without being told to.
    pub(super) auto_dismiss: bool,
    /// How the filter is called that it puts in front of a node; otherwise it has no name.
    pub(super) filter: Option<String>,
}

/// A job.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) settings: Settings,
    pub(super) control: JobControl,
    status: Cell<Status>,
    /// Bytes done, and bytes to do.
    progress: Cell<(u64, u64)>,
    /// It is to complete: with its result in force, or, if that is not wanted, as it is.
    completion: Cell<Option<Completion>>,
    finalized: Cell<bool>,
    /// A client has told it to end.
    is_unwanted: Cell<bool>,
    /// One of its group puts its result in force: all do.
    decided: Cell<bool>,
    /// The node and the name of a bitmap that nobody else may change meanwhile.
    bitmap: RefCell<Option<(String, String)>>,
    error: RefCell<Option<String>>,
    /// The other jobs of a transaction, of which all succeed or none.
    group: RefCell<Vec<Weak<Job>>>,
    /// Whether the requests of its nodes go well: `ok`, `failed`, `nospace`.
    io_status: Cell<&'static str>,
    /// What it copies, if users write to that meanwhile.
    mirror: RefCell<Option<MirrorHandle>>,
    /// The target had all that the source shows, and writers waited for it.
    in_sync: Cell<bool>,
    /// How long users were held up when it ended.
    held: Cell<Option<Duration>>,
    /// How it got on in the last seconds.
    estimate: RefCell<Estimate>,
    events: Events,
    changed: Event,
}

/// How a job that is ready ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Completion {
    /// Users go on with the result.
    InForce,
    /// The result is there, and users go on with what they have.
    Apart,
}

/// What a job does. All that it needs of nodes it has before it begins.
pub(super) trait Work: 'static {
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

/// All jobs; clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct Jobs(Rc<RefCell<Vec<Rc<Job>>>>);

impl Jobs {
    pub(super) fn find(&self, id: &str) -> Option<Rc<Job>> {
        let jobs = self.0.borrow();
        jobs.iter().find(|job| job.settings.id == id).cloned()
    }

    /// All of them, the newest first.
    pub(super) fn list(&self) -> Vec<Rc<Job>> {
        self.0.borrow().iter().rev().cloned().collect()
    }

    /// Whether one of them has a bitmap of a node to itself.
    pub(super) fn keep_bitmap(&self, node: &str, name: &str) -> bool {
        let kept = |job: &Rc<Job>| {
            let bitmap = job.bitmap.borrow();
            let bitmap = bitmap.as_ref();
            bitmap.is_some_and(|(of, called)| of == node && called == name)
        };
        self.0.borrow().iter().any(kept)
    }

    /// Makes a job that has not begun.
    pub(super) fn create(&self, settings: Settings, events: Events) -> Rc<Job> {
        let job = Rc::new(Job {
            settings,
            control: JobControl::new(),
            status: Cell::new(Status::Created),
            progress: Cell::default(),
            completion: Cell::default(),
            finalized: Cell::default(),
            is_unwanted: Cell::default(),
            decided: Cell::default(),
            bitmap: RefCell::default(),
            error: RefCell::default(),
            group: RefCell::default(),
            io_status: Cell::new("ok"),
            mirror: RefCell::default(),
            in_sync: Cell::default(),
            held: Cell::default(),
            estimate: RefCell::default(),
            events,
            changed: Event::new(),
        });
        self.0.borrow_mut().push(job.clone());
        job.enter(Status::Created);
        job
    }

    /// Forgets a job.
    pub(super) fn dismiss(&self, job: &Rc<Job>) {
        self.0.borrow_mut().retain(|other| !Rc::ptr_eq(other, job));
        job.enter(Status::Null);
    }

    /// Ends a job that was prepared and has not begun.
    pub(super) fn abandon(&self, job: &Rc<Job>) {
        job.enter(Status::Aborting);
        job.enter(Status::Concluded);
        self.dismiss(job);
    }

    /// Gives all jobs up, and waits until they are over.
    pub(super) async fn cancel_all(&self) {
        for job in self.list() {
            if job.status().accepts(Verb::Cancel) {
                job.cancel();
            }
            job.until(|job| matches!(job.status(), Status::Concluded | Status::Null))
                .await;
            if job.status() == Status::Concluded {
                self.dismiss(&job);
            }
        }
    }
}

impl Job {
    pub(super) fn status(&self) -> Status {
        self.status.get()
    }

    pub(super) fn enter(&self, status: Status) {
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
    pub(super) fn failure(&self) -> Option<String> {
        self.error.borrow().clone()
    }

    /// Whether it has the events of block jobs, and is listed among them.
    pub(super) fn is_block_job(&self) -> bool {
        !matches!(self.settings.kind, create::KIND | amend::KIND)
    }

    /// Keeps a bitmap of a node to itself, until it is over.
    pub(super) fn keep_bitmap(&self, node: &str, name: &str) {
        let bitmap = (node.to_owned(), name.to_owned());
        self.bitmap.replace(Some(bitmap));
    }

    /// Waits until something is so of the job.
    pub(super) async fn until(&self, is_so: impl Fn(&Job) -> bool) {
        loop {
            let changed = self.changed.listen();
            if is_so(self) {
                return;
            }
            changed.await;
        }
    }

    /// The result is there, and is kept up to date.
    pub(super) fn become_ready(&self) {
        self.enter(Status::Ready);
        self.events
            .emit("BLOCK_JOB_READY", self.describe_as_event());
        if self.control.command() == JobCommand::Pause {
            self.enter(Status::Standby);
        }
    }

    pub(super) fn cancel(&self) {
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
    pub(super) fn note_unwanted(&self) {
        self.is_unwanted.set(true);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.control.command() == JobCommand::Cancel
    }

    pub(super) fn is_paused(&self) -> bool {
        self.control.command() == JobCommand::Pause
    }

    /// Whether somebody has paused it: one that a failure has held up may fail again, or go on.
    pub(super) fn is_paused_by_client(&self) -> bool {
        self.is_paused() && self.io_status.get() == "ok"
    }

    /// What it copies while users write to it.
    pub(super) fn follow(&self, mirror: MirrorHandle) {
        self.mirror.replace(Some(mirror));
    }

    /// Whether writers wait for copies because somebody asked for that.
    pub(super) fn is_write_blocking(&self) -> bool {
        let mirror = self.mirror.borrow();
        mirror.as_ref().is_some_and(MirrorHandle::is_write_blocking)
    }

    /// Has writers wait for copies.
    pub(super) fn block_writes(&self) {
        if let Some(mirror) = &*self.mirror.borrow() {
            mirror.block_writes();
        }
        // What is left is copied now, not with the next write.
        self.changed.notify(usize::MAX);
    }

    pub(super) fn note_sync(&self, is_in_sync: bool) {
        self.in_sync.set(is_in_sync);
    }

    pub(super) fn note_hold(&self, held: Duration) {
        self.held.set(Some(held));
    }

    /// Keeps what there was to tell of what it copied.
    fn unfollow(&self) {
        self.progress.set(self.progress());
        self.in_sync.set(self.is_in_sync());
        self.mirror.take();
    }

    fn progress(&self) -> (u64, u64) {
        match &*self.mirror.borrow() {
            None => self.progress.get(),
            Some(mirror) => {
                let (done_bytes, left_bytes) = mirror.progress();
                (done_bytes, done_bytes + left_bytes)
            }
        }
    }

    fn is_in_sync(&self) -> bool {
        let mirror = self.mirror.borrow();
        let holds = |mirror: &MirrorHandle| mirror.is_write_blocking() && mirror.progress().1 == 0;
        self.in_sync.get() && mirror.as_ref().is_none_or(holds)
    }

    pub(super) fn pause(&self) {
        self.control.set(JobCommand::Pause);
        self.enter(match self.status() {
            Status::Ready => Status::Standby,
            _ => Status::Paused,
        });
    }

    pub(super) fn resume(&self) {
        self.enter(match self.status() {
            Status::Standby => Status::Ready,
            _ => Status::Running,
        });
        self.io_status.set("ok");
        self.control.set(JobCommand::Run);
    }

    pub(super) fn complete(&self, completion: Completion) {
        self.completion.set(Some(completion));
        self.changed.notify(usize::MAX);
    }

    pub(super) fn completion(&self) -> Option<Completion> {
        self.completion.get()
    }

    /// Has it, and all of its group, put their results in force.
    pub(super) fn finalize(&self) {
        self.finalized.set(true);
        self.changed.notify(usize::MAX);
        for other in self.others() {
            other.finalized.set(true);
            other.changed.notify(usize::MAX);
        }
    }

    /// Whether it, or one of its group, waits for a word before results are put in force.
    fn waits_for_word(&self) -> bool {
        let waits = |job: &Job| !job.settings.auto_finalize;
        waits(self) || self.others().iter().any(|other| waits(other))
    }

    /// Whether its result is to be put in force now; those of its group are then, too, whatever
    /// comes.
    fn decide(&self) -> bool {
        let others = self.others();
        let is_given_up = self.is_cancelled() || others.iter().any(|other| other.is_cancelled());
        if !self.decided.get() && is_given_up {
            return false;
        }
        self.decided.set(true);
        others.iter().for_each(|other| other.decided.set(true));
        true
    }

    pub(super) fn set_progress(&self, done_bytes: u64, total_bytes: u64) {
        self.progress.set((done_bytes, total_bytes));
    }

    /// Has some jobs end together: with their results in force, or, if one of them fails, as if
    /// they had been cancelled.
    pub(super) fn group(jobs: &[&Rc<Job>]) {
        for job in jobs {
            let others = jobs.iter().filter(|other| !Rc::ptr_eq(other, job));
            job.group
                .replace(others.map(|other| Rc::downgrade(other)).collect());
        }
    }

    fn others(&self) -> Vec<Rc<Job>> {
        self.group
            .borrow()
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }

    /// Waits until the other jobs of its group are as far.
    async fn wait_for_group(&self) {
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
    fn cancel_group(&self) {
        for other in self.group.take().iter().filter_map(Weak::upgrade) {
            if other.status().accepts(Verb::Cancel) || other.status() == Status::Waiting {
                other.cancel();
            }
        }
    }

    /// What its events tell.
    fn describe_as_event(&self) -> Value {
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
    pub(super) fn describe(&self) -> Value {
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
    pub(super) fn describe_block_job(&self) -> Value {
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
        if self.settings.kind == mirror::KIND {
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

/// Has a job do its work, in the background.
pub(super) fn start(daemon: Rc<Daemon>, job: Rc<Job>, work: impl Work) {
    job.enter(Status::Running);
    drop(spawn(lead(daemon, job, work)));
}

/// Leads a job to its end.
async fn lead(daemon: Rc<Daemon>, job: Rc<Job>, mut work: impl Work) {
    let watch = pin!(job.watch(daemon.estimates.get()));
    let mut outcome = match select(pin!(work.run(&job)), watch).await {
        Either::Left((outcome, _)) => outcome,
        Either::Right((never, _)) => match never {},
    };
    if matches!(outcome, Ok(CopyOutcome::All)) {
        outcome = finalize(&daemon, &job, &mut work).await;
    }
    if !matches!(outcome, Ok(CopyOutcome::All)) {
        job.cancel_group();
        job.enter(Status::Aborting);
    }
    let parts = daemon.parts.lock().await;
    job.unfollow();
    work.leave().await;
    job.bitmap.take();
    drop(parts);
    let is_over = matches!(outcome, Ok(CopyOutcome::All)) || job.is_unwanted.get();
    daemon.record_end(&job.settings.id, is_over).await;
    let mut described = job.describe_as_event();
    match &outcome {
        Ok(_) => trace!(name: "job_completed", job = job.settings.id),
        Err(error) => trace!(name: "job_completed", job = job.settings.id, error = %error),
    }
    let event = match outcome {
        Ok(CopyOutcome::All) => "BLOCK_JOB_COMPLETED",
        Ok(CopyOutcome::GivenUp) => {
            job.error.replace(Some("Operation canceled".to_owned()));
            "BLOCK_JOB_CANCELLED"
        }
        Err(error) => {
            let text = qmp::without_hints(&error_text(&error)).to_owned();
            described["error"] = json!(text);
            job.error.replace(Some(text));
            "BLOCK_JOB_COMPLETED"
        }
    };
    if job.is_block_job() {
        job.events.emit(event, described);
    }
    job.enter(Status::Concluded);
    if job.settings.auto_dismiss {
        daemon.jobs.dismiss(&job);
    }
}

/// Waits until the result may be put in force, and does that.
async fn finalize(daemon: &Daemon, job: &Job, work: &mut impl Work) -> vellum::Result<CopyOutcome> {
    job.enter(Status::Waiting);
    job.wait_for_group().await;
    if job.is_cancelled() {
        return Ok(CopyOutcome::GivenUp);
    }
    job.enter(Status::Pending);
    if !job.settings.auto_finalize {
        let data = json!({"type": job.settings.kind, "id": job.settings.id});
        job.events.emit("BLOCK_JOB_PENDING", data);
    }
    if job.waits_for_word() {
        job.until(|job| job.finalized.get() || job.is_cancelled())
            .await;
    }
    match select(pin!(work.draw_near()), pin!(job.until(Job::is_cancelled))).await {
        Either::Left((near, _)) => near?,
        Either::Right(_) => return Ok(CopyOutcome::GivenUp),
    }
    let _parts = daemon.parts.lock().await;
    if !job.decide() {
        return Ok(CopyOutcome::GivenUp);
    }
    match work.conclude(job).await {
        Err(_) if job.is_cancelled() => Ok(CopyOutcome::GivenUp),
        concluded => concluded.map(|()| CopyOutcome::All),
    }
}

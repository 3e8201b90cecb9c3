//! [`Jobs`]: all jobs that there are.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use event_listener::Event;
use vellum_jobs::job::{JobControl, Status, Verb};

use crate::events::Events;

use super::job::{Job, Settings};

/// All jobs; clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Jobs(Rc<RefCell<Vec<Rc<Job>>>>);

impl Jobs {
    pub(crate) fn find(&self, id: &str) -> Option<Rc<Job>> {
        let jobs = self.0.borrow();
        jobs.iter().find(|job| job.settings.id == id).cloned()
    }

    /// All of them, the newest first.
    pub(crate) fn list(&self) -> Vec<Rc<Job>> {
        self.0.borrow().iter().rev().cloned().collect()
    }

    /// Whether one of them has a bitmap of a node to itself.
    pub(crate) fn keep_bitmap(&self, node: &str, name: &str) -> bool {
        let kept = |job: &Rc<Job>| {
            let bitmap = job.bitmap.borrow();
            let bitmap = bitmap.as_ref();
            bitmap.is_some_and(|(of, called)| of == node && called == name)
        };
        self.0.borrow().iter().any(kept)
    }

    /// Makes a job that has not begun.
    pub(crate) fn create(&self, settings: Settings, events: Events) -> Rc<Job> {
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
    pub(crate) fn dismiss(&self, job: &Rc<Job>) {
        self.0.borrow_mut().retain(|other| !Rc::ptr_eq(other, job));
        job.enter(Status::Null);
    }

    /// Ends a job that was prepared and has not begun.
    pub(crate) fn abandon(&self, job: &Rc<Job>) {
        job.enter(Status::Aborting);
        job.enter(Status::Concluded);
        self.dismiss(job);
    }

    /// Gives all jobs up, and waits until they are over.
    pub(crate) async fn cancel_all(&self) {
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

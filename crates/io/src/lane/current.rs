//! The calling thread's lane: which one it is, and what it can do.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::backend::{Backend, LaneOptions};
use super::run_loop::Lane;
use crate::executor::Executor;
use crate::sync::thread_local;
use crate::{Error, ErrorKind, Result};

static NEXT_NUMBER: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static LANE: RefCell<Option<Rc<Lane>>> = const { RefCell::new(None) };
    static NUMBER: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Sets up the calling thread's lane.
///
/// # Errors
/// If the thread has one already, or the backend that `options` insist on cannot
/// be had.
pub fn install(options: &LaneOptions) -> Result<()> {
    LANE.with(|lane| {
        let mut lane = lane.borrow_mut();
        if lane.is_some() {
            let message = "the thread has a lane already";
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "install lane",
                message,
            ));
        }
        *lane = Some(Rc::new(Lane::new(options)?));
        Ok(())
    })
}

/// The calling thread's lane, made with default options if there is none.
pub(super) fn current() -> Result<Rc<Lane>> {
    let existing = LANE.try_with(|lane| lane.borrow().clone());
    match existing {
        Ok(Some(lane)) => Ok(lane),
        Ok(None) => {
            let lane = Rc::new(Lane::new(&LaneOptions::default())?);
            LANE.with(|current| current.replace(Some(lane.clone())));
            Ok(lane)
        }
        Err(_) => Err(Error::new(
            ErrorKind::Io,
            "use lane",
            "the thread is ending",
        )),
    }
}

/// The lane, where there is no way to report an error.
pub(super) fn current_or_panic() -> Rc<Lane> {
    match current() {
        Ok(lane) => lane,
        Err(error) => panic!("cannot set up this thread's lane: {error}"),
    }
}

/// Calls `work` with the executor that the caller is inside, or else with that of the calling
/// thread's lane; returns `ended()` if that lane has ended with its thread.
pub(super) fn with_executor<R>(work: impl FnOnce(&Executor) -> R, ended: fn() -> R) -> R {
    if let Some(executor) = Executor::current() {
        return work(&executor);
    }
    match LANE.try_with(|_| ()) {
        Ok(()) => work(current_or_panic().executor()),
        Err(_) => ended(),
    }
}

/// Whether the calling thread is inside [`super::block_on`], [`super::turn`] or
/// [`super::finish`]; not so in a simulation, whose executor has no lane.
pub fn is_running() -> bool {
    LANE.try_with(|lane| lane.borrow().as_ref().is_some_and(|lane| lane.is_running()))
        .unwrap_or(false)
}

/// What the calling thread's lane runs on; never [`Backend::Auto`].
///
/// # Panics
/// If a lane cannot be set up at all.
pub fn backend() -> Backend {
    current_or_panic().reactor().backend()
}

/// Whether the calling thread's lane can start commands of devices: it was asked for, and the
/// kernel has them.
///
/// # Panics
/// If a lane cannot be set up at all.
pub fn takes_commands() -> bool {
    current_or_panic().reactor().takes_commands()
}

/// A number for the calling thread's lane, to deal things out among lanes.
pub fn number() -> usize {
    NUMBER.with(|number| {
        let known = number
            .get()
            .unwrap_or_else(|| NEXT_NUMBER.fetch_add(1, Ordering::Relaxed));
        number.set(Some(known));
        known
    })
}

/// Makes the calling thread's lane another one: for simulations, which have several on one
/// thread.
pub fn set_number(lane: usize) {
    NUMBER.with(|number| number.set(Some(lane)));
}

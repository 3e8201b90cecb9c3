//! Requests on the calling thread's lane: how they start, and common ends of them.

use std::future::Future;
use std::sync::Arc;

use super::current::current;
use super::descriptor::Descriptor;
use super::op::Op;
use super::request::{Completion, Request};
use crate::executor::Executor;
use crate::{Buffers, Io, Result};

/// Starts a request on the calling thread's lane.
///
/// # Errors
/// What `finish` makes of the end of the request; what the system says where the thread can
/// have no lane.
pub fn submit<T>(request: Request, finish: fn(Completion) -> Result<T>) -> Io<T> {
    match current() {
        Ok(lane) => Io::lane(lane.reactor().start(request, finish)),
        Err(error) => Io::ready(Err(error)),
    }
}

/// Runs a blocking call on a worker thread.
///
/// # Errors
/// As [`submit`].
pub fn call<T>(
    file: &Arc<Descriptor>,
    name: &'static str,
    work: impl FnOnce() -> Result<i64, i32> + Send + 'static,
    finish: fn(Completion) -> Result<T>,
) -> Io<T> {
    let op = Op::Call {
        name,
        work: Some(Box::new(work)),
    };
    submit(Request::new(file.clone(), op, Buffers::new()), finish)
}

/// Runs a request that takes several steps as a task, so that it goes on when
/// its [`Io`] is dropped.
///
/// # Errors
/// That of `future`; what the system says where the thread can have no lane.
pub fn task<T: 'static>(future: impl Future<Output = Result<T>> + 'static) -> Io<T> {
    if let Some(executor) = Executor::current() {
        return Io::task(executor.spawn(future));
    }
    match current() {
        Ok(lane) => Io::task(lane.executor().spawn(future)),
        Err(error) => Io::ready(Err(error)),
    }
}

/// The end of a request that gives nothing back.
///
/// # Errors
/// As [`Completion::value`].
pub fn finish_unit(done: Completion) -> Result<()> {
    done.value().map(drop)
}

/// The end of a request that gives its buffers back.
///
/// # Errors
/// As [`Completion::value`].
pub fn finish_buffers(done: Completion) -> Result<Buffers> {
    done.value()?;
    Ok(done.request.buffers)
}

//! Lanes: one thread's requests and tasks.
//!
//! A lane is an I/O backend (io_uring, or worker threads where the kernel refuses
//! it), a single-threaded [`Executor`] and timers. Each thread has at most one;
//! [`block_on`] drives it, or, in an event loop of somebody else's, [`turn`] whenever
//! [`fd`] can be read; [`LaneThread`] is a thread for callers that block. Submissions
//! collect while tasks run and go to the kernel with the system call that waits.
//!
//! Invariants:
//! - What a request points to (descriptor, buffers) belongs to the request until
//!   its completion arrives. Dropping an [`Io`] abandons the result; only
//!   requests that could wait forever (receive, accept, poll) are cancelled.
//! - A lane is not gone before its requests are: dropping it, at the latest when
//!   its thread ends, waits for everything in flight.
//! - Work in the background ends with its lane at the latest, and says so: nobody waits for
//!   what was abandoned. A thread that ends before its image does calls [`finish`].

mod backend;
mod compute;
mod descriptor;
// The model's event counter is nothing that a kernel could poll.
#[cfg(not(shuttle))]
mod event_loop;
#[cfg(all(test, shuttle))]
mod interleavings;
pub mod message;
pub mod net;
mod op;
#[cfg(not(shuttle))]
mod poll_set;
pub mod queue_entry;
mod reactor;
mod request;
mod ring;
mod submission;
mod syncs;
mod thread;
mod thread_pool;
mod threads;
mod timer;
mod uring;
mod workers;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use crate::executor::{Executor, JoinHandle};
use crate::sync::thread_local;
use crate::sys::{self, EventFd};
use crate::{Buffers, Error, ErrorKind, Io, Result};

pub use crate::executor::{Remote, RemoteCall};
use backend::Wait;
pub use backend::{BACKEND_VARIABLE, Backend, LaneOptions};
pub use compute::{Computation, compute, compute_threads};
pub use descriptor::Descriptor;
#[cfg(not(shuttle))]
pub use event_loop::{fd, turn};
pub use op::Op;
use reactor::Reactor;
pub(crate) use reactor::RequestFuture;
pub use request::{Completion, Request};
pub use thread::LaneThread;
pub use timer::{Clock, Sleep, now, sleep, sleep_until};

/// How often ready tasks may follow each other before the kernel gets a turn.
const MAX_ROUNDS: usize = 16;

struct Lane {
    executor: Executor,
    reactor: Rc<Reactor>,
    timers: Rc<timer::Timers>,
    running: Cell<bool>,
    #[cfg(not(shuttle))]
    poll_set: std::cell::OnceCell<Rc<poll_set::PollSet>>,
    #[cfg(not(shuttle))]
    event: Arc<EventFd>,
}

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
fn current() -> Result<Rc<Lane>> {
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
fn current_or_panic() -> Rc<Lane> {
    match current() {
        Ok(lane) => lane,
        Err(error) => panic!("cannot set up this thread's lane: {error}"),
    }
}

/// Drives the calling thread's lane until `future` is done, and what was started with
/// [`crate::spawn_to_completion`]. [`crate::spawn`] works inside; other tasks that are not
/// done then go on with the next call.
///
/// # Panics
/// Inside itself (await instead), and if a lane cannot be set up at all. If a task panics, not
/// only `future`: its panic comes out of here, and `future` is dropped. The other tasks go on
/// with the next call.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    current_or_panic().block_on(future)
}

/// Drives the calling thread's lane until no task is left, such as work that a
/// device does in the background, and none that was handed over with [`Remote::spawn`]. A
/// thread whose lane was used for devices that others go on using should end with it: tasks
/// of a lane that ends are dropped.
///
/// # Panics
/// As [`block_on`].
pub fn finish() {
    current_or_panic().finish();
}

/// Starts a task on the calling thread's lane, from inside it or not. The task runs while
/// the lane does: in [`block_on`], [`turn`] or [`finish`]; its handle may be awaited by
/// another executor of the same thread. Once the thread's lane has ended (what drops with the
/// thread's locals may come so late), the task is dropped.
///
/// # Panics
/// If a lane cannot be set up at all.
pub fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
    with_executor(|executor| executor.spawn(future), JoinHandle::of_none)
}

/// As [`spawn`], for work that others may have to wait for, on other threads too: a lane does
/// not leave [`block_on`] before it is done.
///
/// # Panics
/// As [`spawn`].
pub fn spawn_to_completion<T: 'static>(future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
    with_executor(
        |executor| executor.spawn_to_completion(future),
        JoinHandle::of_none,
    )
}

/// Calls `work` with the executor that the caller is inside, or else with that of the calling
/// thread's lane; returns `ended()` if that lane has ended with its thread.
fn with_executor<R>(work: impl FnOnce(&Executor) -> R, ended: fn() -> R) -> R {
    if let Some(executor) = Executor::current() {
        return work(&executor);
    }
    match LANE.try_with(|_| ()) {
        Ok(()) => work(&current_or_panic().executor),
        Err(_) => ended(),
    }
}

/// Whether the calling thread is inside [`block_on`], [`turn`] or [`finish`]; not so in a
/// simulation, whose executor has no lane.
pub fn is_running() -> bool {
    LANE.try_with(|lane| {
        lane.borrow()
            .as_ref()
            .is_some_and(|lane| lane.running.get())
    })
    .unwrap_or(false)
}

/// A handle that starts tasks on the calling thread's lane from other threads.
/// They run while that lane is inside [`block_on`], [`turn`] or [`finish`].
///
/// # Panics
/// If a lane cannot be set up at all.
pub fn remote() -> Remote {
    current_or_panic().executor.remote()
}

/// What the calling thread's lane runs on; never [`Backend::Auto`].
///
/// # Panics
/// If a lane cannot be set up at all.
pub fn backend() -> Backend {
    current_or_panic().reactor.backend()
}

/// Whether the calling thread's lane can start commands of devices: it was asked for, and the
/// kernel has them.
///
/// # Panics
/// If a lane cannot be set up at all.
pub fn takes_commands() -> bool {
    current_or_panic().reactor.takes_commands()
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

/// Hands over at once what the tasks of the calling thread's lane have started, and takes in what is
/// complete, without waiting; a lane does both by itself when its tasks have nothing to do, or
/// after some rounds of them. For tasks that look for something again and again.
///
/// # Panics
/// If a lane cannot be set up at all.
pub fn hand_over() {
    current_or_panic().reactor.turn(Wait::No, || {});
}

/// Lets other tasks and completions have a turn.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Waits until `fd` can be read. Dropping the request ends the wait.
///
/// # Errors
/// What the system says, also where the thread can have no lane.
pub fn poll_readable(fd: BorrowedFd<'_>) -> Io<()> {
    poll_descriptor(fd, libc::POLLIN)
}

/// Whether whoever is at the other end of a socket sends nothing more, or is gone, whatever has
/// been received of what it has sent.
pub fn has_peer_left(fd: BorrowedFd<'_>) -> bool {
    sys::poll_once(fd.as_raw_fd(), libc::POLLRDHUP).is_ok()
}

/// Whether nobody is at the other end of a socket any more, neither to send nor to receive. A peer of
/// TCP that has gone is not told from one that only sends no more before something is sent to it.
pub fn has_hung_up(fd: BorrowedFd<'_>) -> bool {
    // POLLHUP and POLLERR are told of without being asked for.
    sys::poll_once(fd.as_raw_fd(), 0).is_ok()
}

/// Waits until `fd` can be written. Dropping the request ends the wait.
///
/// # Errors
/// As [`poll_readable`].
pub fn poll_writable(fd: BorrowedFd<'_>) -> Io<()> {
    poll_descriptor(fd, libc::POLLOUT)
}

fn poll_descriptor(fd: BorrowedFd<'_>, events: i16) -> Io<()> {
    // A duplicate: the request must own what it waits for.
    match fd.try_clone_to_owned() {
        Ok(fd) => {
            let file = Arc::new(Descriptor::new(fd, "descriptor"));
            submit(
                Request::new(file, Op::Poll { events }, Buffers::new()),
                finish_unit,
            )
        }
        Err(error) => Io::ready(Err(Error::from_io("poll", &error))),
    }
}

/// Starts a request on the calling thread's lane.
///
/// # Errors
/// What `finish` makes of the end of the request; what the system says where the thread can
/// have no lane.
pub fn submit<T>(request: Request, finish: fn(Completion) -> Result<T>) -> Io<T> {
    match current() {
        Ok(lane) => Io::lane(lane.reactor.start(request, finish)),
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
        Ok(lane) => Io::task(lane.executor.spawn(future)),
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

impl Lane {
    fn new(options: &LaneOptions) -> Result<Self> {
        let event = EventFd::new().map_err(|errno| Error::from_errno("set up lane", errno))?;
        let event = Arc::new(event);
        let reactor = Rc::new(Reactor::new(options, &event)?);
        let notified = event.clone();
        let executor = Executor::new(move || notified.signal());
        Ok(Lane {
            executor,
            reactor,
            timers: Rc::default(),
            running: Cell::new(false),
            #[cfg(not(shuttle))]
            poll_set: std::cell::OnceCell::new(),
            #[cfg(not(shuttle))]
            event,
        })
    }

    /// Marks the lane as running until the guard is dropped.
    fn start(&self) -> Running<'_> {
        self.running.set(true);
        #[cfg(not(shuttle))]
        self.unpark();
        Running(self)
    }

    fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        assert!(
            !self.running.get(),
            "lane::block_on inside a lane: await instead"
        );
        let _running = self.start();
        let mut future = pin!(future);
        let waker = self.executor.root_waker();
        let mut context = Context::from_waker(&waker);
        waker.wake_by_ref();
        self.executor.enter(|| {
            loop {
                self.run_tasks();
                if self.executor.take_root_wake()
                    && let Poll::Ready(value) = future.as_mut().poll(&mut context)
                {
                    self.run_while(|executor| executor.tasks_to_complete() > 0);
                    return value;
                }
                self.wait();
            }
        })
    }

    fn run_while(&self, goes_on: impl Fn(&Executor) -> bool) {
        while goes_on(&self.executor) {
            self.run_tasks();
            if goes_on(&self.executor) {
                self.wait();
            }
        }
    }

    fn finish(&self) {
        assert!(
            !self.running.get(),
            "lane::finish inside a lane: its tasks go on anyway"
        );
        let _running = self.start();
        self.executor.enter(|| self.run_while(Executor::has_tasks));
    }

    /// Runs tasks until none is ready, the root future is, or the kernel must
    /// have its turn; returns whether any ran.
    fn run_tasks(&self) -> bool {
        for round in 0..MAX_ROUNDS {
            if !self.executor.run_batch() {
                return round > 0;
            }
            if self.executor.root_is_woken() {
                break;
            }
        }
        true
    }

    /// Submits what the tasks started, and waits if there is nothing else to do.
    fn wait(&self) {
        let wait = match self.executor.prepare_to_sleep() {
            false => Wait::No,
            true => self.timers.next().map_or(Wait::Forever, Wait::Until),
        };
        self.reactor.turn(wait, || self.executor.end_sleep());
        self.timers.fire();
    }
}

/// Marks the lane as not running again, and hands over what was started last.
struct Running<'a>(&'a Lane);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.reactor.turn(Wait::No, || {});
        self.0.running.set(false);
        #[cfg(not(shuttle))]
        self.0.park();
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.executor.close();
        self.reactor.shut_down();
    }
}

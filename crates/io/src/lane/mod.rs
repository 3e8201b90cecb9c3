//! Lanes: one thread's requests and tasks.
//!
//! A lane is an I/O backend (io_uring, or worker threads where the kernel refuses
//! it), a single-threaded [executor](crate::executor) and timers. Each thread has at most one;
//! [`block_on`] drives it, or, in an event loop of somebody else's, [`turn`] whenever
//! [`fd`] can be read; [`LaneThread`] is a thread for callers that block. Submissions
//! collect while tasks run and go to the kernel with the system call that waits.
//!
//! Invariants:
//! - What a request points to (descriptor, buffers) belongs to the request until
//!   its completion arrives. Dropping an [`crate::Io`] abandons the result; only
//!   requests that could wait forever (receive, accept, poll) are cancelled.
//! - A lane is not gone before its requests are: dropping it, at the latest when
//!   its thread ends, waits for everything in flight.
//! - Work in the background ends with its lane at the latest, and says so: nobody waits for
//!   what was abandoned. A thread that ends before its image does calls [`finish`].
//!
//! | layer, from the bottom up | files |
//! | --- | --- |
//! | a request: its command, what it does, its descriptor and the syncs of that, its state | `queue_entry/command`, `op`, `syncs`, `descriptor`, `request` |
//! | io_uring | `ring`, `submission`, `uring` |
//! | where the kernel refuses that | `thread_pool`, `workers`, `threads` |
//! | either of them ([`Backend`]), with a slot for each request | `backend`, `reactor` |
//! | a lane: requests, timers and tasks in one loop; what a foreign event loop polls | `poll_set`, `timer`, `run_loop` |
//! | the calling thread's lane | `current`, `tasks`, `submit` |
//! | what is built on that | `compute`, `poll`, `message`, `net`, `queue_entry`, `event_loop`, `thread` |

mod backend;
mod compute;
mod current;
mod descriptor;
// The model's event counter is nothing that a kernel could poll.
#[cfg(not(shuttle))]
mod event_loop;
#[cfg(all(test, shuttle))]
mod interleavings;
pub mod message;
pub mod net;
mod op;
mod poll;
#[cfg(not(shuttle))]
mod poll_set;
pub mod queue_entry;
mod reactor;
mod request;
mod ring;
mod run_loop;
mod submission;
mod submit;
mod syncs;
mod tasks;
mod thread;
mod thread_pool;
mod threads;
mod timer;
mod uring;
mod workers;

pub use crate::executor::{Remote, RemoteCall};
pub use backend::{BACKEND_VARIABLE, Backend, LaneOptions};
pub use compute::{Computation, compute, compute_threads};
pub use current::{backend, install, is_running, number, set_number, takes_commands};
pub use descriptor::Descriptor;
#[cfg(not(shuttle))]
pub use event_loop::{fd, turn};
pub use op::Op;
pub use poll::{has_hung_up, has_peer_left, poll_readable, poll_writable};
pub(crate) use reactor::RequestFuture;
pub use request::{Completion, Request};
pub use submit::{call, finish_buffers, finish_unit, submit, task};
pub use tasks::{
    block_on, finish, hand_over, remote, sleep, sleep_until, spawn, spawn_to_completion, yield_now,
};
pub use thread::LaneThread;
pub use timer::{Clock, Sleep, now};

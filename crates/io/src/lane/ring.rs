//! The kernel's ring of a lane, in one of two widths.
//!
//! A wide ring takes commands of devices ([`super::queue_entry`]) beside everything else; its
//! submissions are twice as long. Only a lane that was asked for has one.
//!
//! Invariant: a wide ring runs what the kernel does for a command in this thread's
//! `io_uring_enter` only, so nothing of it runs any more once the ring is dropped.

use std::io;
#[cfg(not(shuttle))]
use std::os::fd::RawFd;
use std::time::Instant;

use io_uring::squeue::{self, Entry128, EntryMarker};
use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{Builder, IoUring, Parameters};

use super::backend::Wait;

/// A ring.
pub(super) enum Ring {
    Narrow(IoUring),
    Wide(IoUring<Entry128>),
}

/// Does the same with either.
macro_rules! with {
    ($ring:expr, $inner:ident => $work:expr) => {
        match $ring {
            Ring::Narrow($inner) => $work,
            Ring::Wide($inner) => $work,
        }
    };
}

impl Ring {
    /// A ring for `entries` submissions at a time, with the cheapest completion delivery that
    /// the kernel offers.
    pub(super) fn narrow(entries: u32) -> io::Result<Ring> {
        let builder = builder(entries);
        let built = deferred(builder.clone()).build(entries);
        // Without inter-processor interrupts (5.19), then plain.
        let built = built.or_else(|_| {
            let mut cooperative = builder.clone();
            cooperative.setup_coop_taskrun().setup_taskrun_flag();
            cooperative.build(entries)
        });
        let built = built.or_else(|_| {
            let mut plain = IoUring::builder();
            plain.setup_clamp().setup_cqsize(entries.saturating_mul(4));
            plain.build(entries)
        });
        Ring::Narrow(built?).checked()
    }

    /// A ring that takes commands, too (Linux 6.1).
    pub(super) fn wide(entries: u32) -> io::Result<Ring> {
        let built = deferred(builder(entries)).build(entries);
        Ring::Wide(built?).checked()
    }

    fn checked(self) -> io::Result<Ring> {
        let parameters = self.parameters();
        match parameters.is_feature_nodrop()
            && parameters.is_feature_submit_stable()
            && parameters.is_feature_ext_arg()
        {
            true => Ok(self),
            false => Err(io::Error::from_raw_os_error(libc::ENOSYS)),
        }
    }

    fn parameters(&self) -> &Parameters {
        with!(self, ring => ring.params())
    }

    /// Whether it takes commands.
    pub(super) fn is_wide(&self) -> bool {
        matches!(self, Ring::Wide(_))
    }

    /// How many completions have room.
    pub(super) fn completion_room(&self) -> usize {
        self.parameters().cq_entries() as usize
    }

    /// Queues a submission; `false` if there is no room.
    ///
    /// # Safety
    /// What it points to must stay in place until its completion.
    pub(super) unsafe fn push(&mut self, submission: &squeue::Entry) -> bool {
        match self {
            // SAFETY: the caller's promise.
            Ring::Narrow(ring) => unsafe { ring.submission().push(submission) }.is_ok(),
            Ring::Wide(ring) => {
                let submission = Entry128::from(submission.clone());
                // SAFETY: the caller's promise.
                unsafe { ring.submission().push(&submission) }.is_ok()
            }
        }
    }

    /// As [`Ring::push`], of a command. A narrow ring, which gets none, would do nothing instead.
    ///
    /// # Safety
    /// As [`Ring::push`].
    pub(super) unsafe fn push_command(&mut self, command: &Entry128) -> bool {
        match self {
            // SAFETY: the caller's promise.
            Ring::Wide(ring) => unsafe { ring.submission().push(command) }.is_ok(),
            Ring::Narrow(ring) => {
                let nothing = io_uring::opcode::Nop::new().build();
                let nothing = nothing.user_data(command.get_user_data());
                // SAFETY: it points to nothing.
                unsafe { ring.submission().push(&nothing) }.is_ok()
            }
        }
    }

    /// Submissions that the kernel has not taken yet.
    pub(super) fn queued(&mut self) -> usize {
        with!(self, ring => ring.submission().len())
    }

    /// Whether the kernel keeps completions back until it is entered.
    pub(super) fn holds_back(&mut self) -> bool {
        with!(self, ring => {
            let queue = ring.submission();
            queue.taskrun() || queue.cq_overflow()
        })
    }

    /// Whether there are completions to be taken.
    pub(super) fn has_completions(&mut self) -> bool {
        with!(self, ring => !ring.completion().is_empty())
    }

    /// The next completion: what the submission was said to be, and its result.
    pub(super) fn next_completion(&mut self) -> Option<(u64, i64)> {
        let next = with!(self, ring => ring.completion().next())?;
        Some((next.user_data(), next.result().into()))
    }

    /// Hands over what is queued.
    pub(super) fn submit(&mut self) -> io::Result<usize> {
        with!(self, ring => ring.submit())
    }

    /// Hands over what is queued, and waits as told.
    pub(super) fn submit_and_wait(&mut self, wait: Wait) -> io::Result<usize> {
        match wait {
            Wait::No => self.submit(),
            Wait::Forever => with!(self, ring => ring.submit_and_wait(1)),
            Wait::Until(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                let time = Timespec::new()
                    .sec(left.as_secs())
                    .nsec(left.subsec_nanos());
                let args = SubmitArgs::new().timespec(&time);
                with!(self, ring => ring.submitter().submit_with_args(1, &args))
            }
        }
    }

    /// Has the kernel count completions in an event counter.
    #[cfg(not(shuttle))]
    pub(super) fn register_eventfd(&mut self, counter: RawFd) -> io::Result<()> {
        with!(self, ring => ring.submitter().register_eventfd(counter))
    }
}

fn builder<S: EntryMarker>(entries: u32) -> Builder<S> {
    let mut builder = IoUring::<S>::builder();
    builder
        .setup_clamp()
        .setup_cqsize(entries.saturating_mul(4))
        .setup_submit_all();
    builder
}

/// Completions run in this thread's `io_uring_enter` only (Linux 6.1).
fn deferred<S: EntryMarker>(mut builder: Builder<S>) -> Builder<S> {
    builder
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag();
    builder
}

//! Which backend a lane's requests run on, and what every backend understands: plain data.

use std::time::Instant;

/// Names the backend in the environment, over [`Backend::Auto`]: `threads` or `io_uring`.
pub const BACKEND_VARIABLE: &str = "VELLUM_LANE";

/// What a lane's requests run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backend {
    /// io_uring, or threads where the kernel refuses it.
    #[default]
    Auto,
    /// io_uring, or an error.
    IoUring,
    /// Worker threads and `poll(2)`.
    Threads,
}

impl Backend {
    pub(super) fn resolve(self) -> Self {
        if self != Backend::Auto {
            return self;
        }
        match std::env::var(BACKEND_VARIABLE).as_deref() {
            Ok("threads") => Backend::Threads,
            Ok("io_uring") => Backend::IoUring,
            // Only threads can have their turns told to them.
            _ if cfg!(shuttle) => Backend::Threads,
            _ => Backend::Auto,
        }
    }
}

/// How a lane is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneOptions {
    /// What requests run on.
    pub backend: Backend,
    /// Submissions that fit into the ring at a time; four times as many requests
    /// may be in the kernel, more wait their turn.
    pub ring_entries: u32,
    /// Commands of devices ([`super::queue_entry`]) can be started, where the kernel has them; all
    /// submissions are longer then.
    pub commands: bool,
}

impl Default for LaneOptions {
    fn default() -> Self {
        LaneOptions {
            backend: Backend::Auto,
            ring_entries: 128,
            commands: false,
        }
    }
}

/// How long a turn may wait for the kernel.
#[derive(Debug, Clone, Copy)]
pub(super) enum Wait {
    No,
    Forever,
    Until(Instant),
}

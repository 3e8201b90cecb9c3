//! How a disk is shown: what may be done to it and by whom, and how requests come.

use crate::fair_depth::FairDepth;
use crate::room::WhenFull;
use crate::size_turns::SizeTurns;

/// Whether others than the user who mounts may use the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AllowOther {
    /// Only that user, and not even root.
    Off,
    /// Everybody, as far as the file's mode says.
    On,
    /// Everybody, if that may be: a user must be allowed to by `/etc/fuse.conf`.
    #[default]
    Auto,
}

/// How requests come from the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// Over io_uring where the kernel has that (Linux 6.14) and it is switched on, else over
    /// `/dev/fuse`.
    #[default]
    Auto,
    /// Over `/dev/fuse`.
    Device,
    /// Over io_uring, or not at all.
    IoUring,
}

vellum_io::with_setters! {
    /// How a disk is shown.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct ExportOptions {
        /// Writes are taken.
        pub writable: bool,
        /// Writes beyond the end make the disk longer.
        pub growable: bool,
        /// The size may be set (`truncate`, `fallocate`) also where it does not grow by writes.
        pub resizable: bool,
        /// Who may use it.
        pub allow_other: AllowOther,
        /// Most threads that serve it; over `/dev/fuse` four at most, whatever is said here.
        pub max_lanes: usize,
        /// How requests come.
        pub transport: Transport,
        /// Exports that it must not keep waiting.
        pub fair_depth: FairDepth,
        /// What becomes of requests for which the device has no room.
        pub when_full: WhenFull,
        /// Held by whoever changes the size of the disk, this export and others.
        pub size_turns: SizeTurns,
    }
}

impl Default for ExportOptions {
    /// To be read by everybody, as far as that may be.
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        ExportOptions {
            writable: false,
            growable: false,
            resizable: false,
            allow_other: AllowOther::Auto,
            max_lanes: processors,
            transport: Transport::Auto,
            fair_depth: FairDepth::default(),
            when_full: WhenFull::Fail,
            size_turns: SizeTurns::default(),
        }
    }
}

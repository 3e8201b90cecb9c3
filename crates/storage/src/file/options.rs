//! [`FileOptions`]: how a file is opened.

use crate::lock::Permissions;

/// Whether opening may make or empty the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Create {
    /// The file must exist.
    #[default]
    No,
    /// Make the file if it does not exist.
    IfMissing,
    /// Make the file if it does not exist, empty it if it does (once its locks
    /// are held).
    Truncate,
}

/// What kind of file is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FileKind {
    /// A regular file or a block device.
    #[default]
    Any,
    /// A regular file (QEMU's `file` driver).
    Regular,
    /// A block or character device (QEMU's `host_device` driver).
    Device,
}

/// Which locks an open takes, before anything of the file is read or changed. They are
/// those that QEMU's programs take on image files, and keep these away too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Locks {
    /// Those of an image's file: [`Permissions::READER`] where it is opened for reading
    /// only, or else [`Permissions::WRITER`].
    #[default]
    Image,
    /// Others.
    Of(Permissions),
    /// None. What is changed without locks somebody else may be changing too, so whoever
    /// says this says why.
    Unlocked,
}

vellum_io::with_setters! {
    /// How to open a file.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct FileOptions {
        /// Open for reading only.
        pub read_only: bool,
        /// Go around the page cache (`O_DIRECT`: cache modes none and directsync).
        pub direct: bool,
        /// Whether to make the file.
        pub create: Create,
        /// What kind of file is wanted.
        pub kind: FileKind,
        /// Ignore flushes (cache mode unsafe).
        pub no_flush: bool,
        /// Give discarded space back; `false`: discards are ignored.
        pub discard: bool,
        /// What is read is not read again: if the file takes at least so many bytes on disk and is
        /// not in the page cache already, it leaves that again behind the reads (Linux 6.5).
        /// [`large_file_bytes`](super::large_file_bytes) is a good choice. `None`: the kernel decides.
        pub read_once_min_bytes: Option<u64>,
        /// The locks to take.
        pub locks: Locks,
    }
}

impl Default for FileOptions {
    fn default() -> Self {
        FileOptions {
            read_only: false,
            direct: false,
            create: Create::No,
            kind: FileKind::Any,
            no_flush: false,
            discard: true,
            read_once_min_bytes: None,
            locks: Locks::Image,
        }
    }
}

impl FileOptions {
    /// What the locks stand for.
    pub(super) fn permissions(&self) -> Option<Permissions> {
        match self.locks {
            Locks::Image if self.read_only => Some(Permissions::READER),
            Locks::Image => Some(Permissions::WRITER),
            Locks::Of(permissions) => Some(permissions),
            Locks::Unlocked => None,
        }
    }
}

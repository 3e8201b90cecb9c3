//! The error type of storage and engine: a stable kind, what was being done, to
//! what, where, and why.

use std::fmt;
use std::sync::Arc;

/// Result of everything that touches storage.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, as a stable category that programs may match on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A file, node or export does not exist.
    NotFound,
    /// The operating system refused access.
    PermissionDenied,
    /// Another process holds a conflicting lock.
    Locked,
    /// The caller's arguments make no sense together.
    InvalidArgument,
    /// The request or the image needs something that is not supported.
    Unsupported,
    /// The bytes are not an image of the expected format, or break its limits.
    InvalidImage,
    /// The image's metadata contradicts itself.
    Corrupt,
    /// A write to something that may only be read.
    ReadOnly,
    /// The storage is full, or a quota or the limit of file sizes (`ulimit -f`) is reached; the
    /// request may be retried after freeing space. A sync that fails for want of room is never of
    /// this kind: see [`Error::of_failed_sync`].
    NoSpace,
    /// A request beyond the end of the device.
    OutOfRange,
    /// A policy (the gate) refused to open another file.
    Denied,
    /// A peer broke its protocol or went away.
    Protocol,
    /// The disk has changed bytes: they do not have their checksum.
    ChecksumMismatch,
    /// A file on another machine is not what it was when it was opened.
    Changed,
    /// Any other failure of the operating system.
    Io,
}

#[derive(Debug)]
struct Inner {
    kind: ErrorKind,
    operation: &'static str,
    target: Option<String>,
    offset_bytes: Option<u64>,
    errno: Option<i32>,
    is_failed_sync: bool,
    /// See [`Error::of_kept_flush`].
    keeps_data: bool,
    message: String,
    source: Option<Error>,
}

/// An error with its kind, operation, target (path or node), offset and source.
///
/// Cheap to clone: one failed load or barrier is reported to every waiter.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

impl Error {
    /// A new error; `message` says what is wrong, in QEMU's words where QEMU has some.
    pub fn new(kind: ErrorKind, operation: &'static str, message: impl Into<String>) -> Self {
        Error(Arc::new(Inner {
            kind,
            operation,
            target: None,
            offset_bytes: None,
            errno: None,
            is_failed_sync: false,
            keeps_data: false,
            message: message.into(),
            source: None,
        }))
    }

    /// An error of the operating system, from `errno`.
    pub fn from_errno(operation: &'static str, errno: i32) -> Self {
        let kind = match errno {
            libc::ENOENT => ErrorKind::NotFound,
            libc::EACCES | libc::EPERM => ErrorKind::PermissionDenied,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => ErrorKind::NoSpace,
            libc::EROFS => ErrorKind::ReadOnly,
            libc::EINVAL => ErrorKind::InvalidArgument,
            libc::ENOTSUP | libc::ENOSYS | libc::ENOTTY => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        let mut error = Error::new(kind, operation, errno_text(errno));
        error.edit(|inner| inner.errno = Some(errno));
        error
    }

    /// An error of the operating system, from a `std::io::Error`.
    pub fn from_io(operation: &'static str, error: &std::io::Error) -> Self {
        match error.raw_os_error() {
            Some(errno) => Error::from_errno(operation, errno),
            None => Error::new(ErrorKind::Io, operation, io_text(error)),
        }
    }

    /// The system has no room for another thread: a limit of threads or processes, or of memory.
    pub fn no_thread(cause: &std::io::Error) -> Self {
        let message = format!("cannot start a thread: {}", io_text(cause));
        let errno = cause.raw_os_error().unwrap_or(libc::EAGAIN);
        Error::new(ErrorKind::Io, "start a thread", message).with_errno(errno)
    }

    /// The last error of the calling thread (`errno`).
    pub fn last_os(operation: &'static str) -> Self {
        Error::from_io(operation, &std::io::Error::last_os_error())
    }

    fn edit(&mut self, change: impl FnOnce(&mut Inner)) {
        if Arc::get_mut(&mut self.0).is_none() {
            let old = &self.0;
            self.0 = Arc::new(Inner {
                kind: old.kind,
                operation: old.operation,
                target: old.target.clone(),
                offset_bytes: old.offset_bytes,
                errno: old.errno,
                is_failed_sync: old.is_failed_sync,
                keeps_data: old.keeps_data,
                message: old.message.clone(),
                source: old.source.clone(),
            });
        }
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            change(inner);
        }
    }

    /// Names the path or node, unless one is named already.
    #[must_use]
    pub fn target(mut self, target: impl Into<String>) -> Self {
        if self.0.target.is_none() {
            self.edit(|inner| inner.target = Some(target.into()));
        }
        self
    }

    /// Names the offset in bytes, unless one is named already.
    #[must_use]
    pub fn at(mut self, offset_bytes: u64) -> Self {
        if self.0.offset_bytes.is_none() {
            self.edit(|inner| inner.offset_bytes = Some(offset_bytes));
        }
        self
    }

    /// Sets the `errno` that best describes this error to a client.
    #[must_use]
    pub fn with_errno(mut self, errno: i32) -> Self {
        self.edit(|inner| inner.errno = Some(errno));
        self
    }

    /// The same failure, of a sync. What that should have made durable may be lost, whatever its
    /// error number, so it is not one that may be tried again ([`ErrorKind::NoSpace`]). A flush that
    /// [keeps](Error::of_kept_flush) its data may.
    #[must_use]
    pub fn of_failed_sync(mut self) -> Self {
        if self.0.keeps_data {
            return self;
        }
        let errno = self.errno();
        self.edit(|inner| {
            inner.is_failed_sync = true;
            if inner.kind == ErrorKind::NoSpace {
                inner.kind = ErrorKind::Io;
                inner.errno = Some(errno);
            }
        });
        self
    }

    /// The same failure, of a flush that found no room and keeps all that it should have made durable: the
    /// next flush does.
    #[must_use]
    pub fn of_kept_flush(mut self) -> Self {
        self.edit(|inner| inner.keeps_data = inner.kind == ErrorKind::NoSpace);
        self
    }

    /// Whether it is, or comes from, a sync that failed ([`Error::of_failed_sync`]).
    pub fn is_failed_sync(&self) -> bool {
        self.0.is_failed_sync
    }

    /// The same kind of failure seen from a higher level: `message` and
    /// `operation` become the outer error, `self` its source.
    #[must_use]
    pub fn context(self, operation: &'static str, message: impl Into<String>) -> Self {
        Error(Arc::new(Inner {
            kind: self.0.kind,
            operation,
            target: None,
            offset_bytes: None,
            errno: self.0.errno,
            is_failed_sync: self.0.is_failed_sync,
            keeps_data: self.0.keeps_data,
            message: message.into(),
            source: Some(self),
        }))
    }

    /// The stable category.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What was being done: a verb such as `"read"` or `"open"`.
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// The path or node concerned, where known.
    pub fn target_name(&self) -> Option<&str> {
        self.0.target.as_deref()
    }

    /// The offset concerned in bytes, where known.
    pub fn offset_bytes(&self) -> Option<u64> {
        self.0.offset_bytes
    }

    /// What is wrong, without operation, target and offset.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The error number that a block device's client should see.
    pub fn errno(&self) -> i32 {
        self.0.errno.unwrap_or(match self.0.kind {
            ErrorKind::NotFound => libc::ENOENT,
            ErrorKind::PermissionDenied | ErrorKind::Denied => libc::EPERM,
            ErrorKind::Locked => libc::EAGAIN,
            ErrorKind::InvalidArgument | ErrorKind::OutOfRange | ErrorKind::InvalidImage => {
                libc::EINVAL
            }
            ErrorKind::Unsupported => libc::ENOTSUP,
            ErrorKind::ReadOnly => libc::EROFS,
            ErrorKind::NoSpace => libc::ENOSPC,
            ErrorKind::Corrupt
            | ErrorKind::Protocol
            | ErrorKind::ChecksumMismatch
            | ErrorKind::Changed
            | ErrorKind::Io => libc::EIO,
        })
    }
}

/// The operating system's text for an error number, as `strerror` gives it.
pub fn errno_text(errno: i32) -> String {
    io_text(&std::io::Error::from_raw_os_error(errno))
}

/// What the operating system says of an error, without the number that the standard
/// library adds.
pub fn io_text(error: &std::io::Error) -> String {
    let text = error.to_string();
    // It may stand inside of what somebody else has added.
    let parts = text
        .split_once(" (os error ")
        .and_then(|(head, rest)| Some((head, rest.split_once(')')?.1)));
    match parts {
        Some((head, tail)) => format!("{head}{tail}"),
        None => text,
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.operation)?;
        if let Some(target) = &self.0.target {
            write!(f, " '{target}'")?;
        }
        if let Some(offset) = self.0.offset_bytes {
            write!(f, " at {offset:#x}")?;
        }
        write!(f, ": {}", self.0.message)?;
        if let Some(source) = &self.0.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|e| e as _)
    }
}

/// What [`From`] says was being done, as nobody has said it.
const UNKNOWN_OPERATION: &str = "input/output";

/// As [`Error::from_io`], for `?` in a caller's own code. The operation is a general word:
/// [`Error::context`] adds what was being done.
impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Error::from_io(UNKNOWN_OPERATION, &error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_error_keeps_its_kind_and_number() {
        fn read(path: &str) -> Result<Vec<u8>> {
            Ok(std::fs::read(path)?)
        }
        let error = read("/nonexistent/file").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert_eq!(error.errno(), libc::ENOENT);
        assert_eq!(error.to_string(), "input/output: No such file or directory");
        let error = error.context("start", "cannot read the list of disks");
        assert_eq!(error.operation(), "start");
        assert_eq!(error.kind(), ErrorKind::NotFound);

        let error = Error::from(std::io::Error::other("half a line"));
        assert_eq!(error.kind(), ErrorKind::Io);
        assert_eq!(error.message(), "half a line");
    }

    #[test]
    fn a_failed_sync_is_not_to_be_tried_again() {
        for errno in [libc::ENOSPC, libc::EDQUOT, libc::EFBIG] {
            let full = Error::from_errno("flush", errno);
            assert_eq!(full.kind(), ErrorKind::NoSpace);
            let lost = full.of_failed_sync();
            assert_eq!((lost.kind(), lost.errno()), (ErrorKind::Io, errno));
        }
        let full = Error::new(ErrorKind::NoSpace, "flush", "full").of_failed_sync();
        assert_eq!((full.kind(), full.errno()), (ErrorKind::Io, libc::ENOSPC));
        let kept = Error::from_errno("flush", libc::ENOSPC).of_kept_flush();
        let above = kept.context("flush", "a node").of_failed_sync();
        assert_eq!(above.kind(), ErrorKind::NoSpace);
        let other = Error::new(ErrorKind::Corrupt, "flush", "odd").of_failed_sync();
        assert_eq!(other.kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn the_number_of_an_error_is_left_out_wherever_it_stands() {
        let plain = std::io::Error::from_raw_os_error(libc::EACCES);
        assert_eq!(io_text(&plain), "Permission denied");
        assert_eq!(errno_text(libc::EACCES), "Permission denied");
        let inside = std::io::Error::other(format!("{plain} at path \"x\""));
        assert_eq!(io_text(&inside), "Permission denied at path \"x\"");
        assert_eq!(io_text(&std::io::Error::other("a (b)")), "a (b)");
    }
}

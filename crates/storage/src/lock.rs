//! Locks between processes, as QEMU takes them on image files.
//!
//! Each permission has two bytes of the file: one is locked by whoever uses the
//! permission, the other by whoever does not want others to. Both locks are
//! shared ones; a conflict shows when the opposite byte turns out to be locked by
//! another open file. The locks belong to the open file description, so they
//! hold between two opens in one process too, and end when the file is closed.

use std::fmt;
use std::os::fd::RawFd;

use crate::sys::{self, LockAction};
use crate::{Error, ErrorKind, Result};

/// First byte that says who uses a permission.
const USED_BASE_BYTES: u64 = 100;
/// First byte that says who refuses to share a permission.
const REFUSED_BASE_BYTES: u64 = 200;

/// A set of permissions.
#[derive(Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct PermissionSet(u8);

impl PermissionSet {
    /// Nothing.
    pub const NONE: Self = PermissionSet(0);
    /// Read data that makes sense together.
    pub const CONSISTENT_READ: Self = PermissionSet(1);
    /// Change data.
    pub const WRITE: Self = PermissionSet(1 << 1);
    /// Write data that is there already (copy on read).
    pub const WRITE_UNCHANGED: Self = PermissionSet(1 << 2);
    /// Change the length.
    pub const RESIZE: Self = PermissionSet(1 << 3);
    /// Everything.
    pub const ALL: Self = PermissionSet(0xf);

    /// Both sets together.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        PermissionSet(self.0 | other.0)
    }

    /// This set without the other's members.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        PermissionSet(self.0 & !other.0)
    }

    /// Whether all of `other` is in this set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    fn bits(self) -> impl Iterator<Item = u64> {
        (0..4).filter(move |bit| self.0 >> bit & 1 != 0)
    }
}

impl fmt::Debug for PermissionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set()
            .entries(self.bits().map(permission_name))
            .finish()
    }
}

/// The name in QEMU's messages.
fn permission_name(bit: u64) -> &'static str {
    match bit {
        0 => "consistent read",
        1 => "write",
        2 => "write unchanged",
        _ => "resize",
    }
}

/// What an opener does with a file, and what it lets others do meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permissions {
    /// What this opener does.
    pub used: PermissionSet,
    /// What others may do.
    pub shared: PermissionSet,
}

impl Permissions {
    /// Nothing used, everything shared: no byte is locked.
    pub const NONE: Self = Permissions {
        used: PermissionSet::NONE,
        shared: PermissionSet::ALL,
    };

    /// The file of an image that is read: nobody may change it.
    pub const READER: Self = Permissions {
        used: PermissionSet::CONSISTENT_READ,
        shared: PermissionSet::ALL
            .without(PermissionSet::WRITE)
            .without(PermissionSet::RESIZE),
    };

    /// The file of an image that is written: nobody else may change it.
    pub const WRITER: Self = Permissions {
        used: PermissionSet::CONSISTENT_READ
            .with(PermissionSet::WRITE)
            .with(PermissionSet::RESIZE),
        shared: Self::READER.shared,
    };

    /// The file of an image of which only the metadata is looked at.
    pub const INSPECTOR: Self = Permissions {
        used: PermissionSet::NONE,
        shared: Self::READER.shared,
    };

    /// A raw image that is written without a claim to it: others may do the same.
    pub const RAW_WRITER: Self = Permissions {
        used: PermissionSet::CONSISTENT_READ.with(PermissionSet::WRITE),
        shared: PermissionSet::ALL,
    };

    /// A raw image that is served: others may write it, but not change its length.
    pub const RAW_EXPORT: Self = Permissions {
        used: Self::RAW_WRITER.used,
        shared: PermissionSet::ALL.without(PermissionSet::RESIZE),
    };

    /// A file that is being made: others may not make it too.
    pub const CREATOR: Self = Permissions {
        used: PermissionSet::WRITE.with(PermissionSet::RESIZE),
        shared: PermissionSet::ALL.without(PermissionSet::RESIZE),
    };

    /// Reading whatever others do (`-U`, and raw images that are only read): only
    /// those conflict who deny reads.
    pub const FORCE_SHARE: Self = Permissions {
        used: PermissionSet::CONSISTENT_READ,
        shared: PermissionSet::ALL,
    };

    fn refused(self) -> PermissionSet {
        PermissionSet::ALL.without(self.shared)
    }
}

/// Moves the locks of an open file from `old` to `new`; after a failure they are
/// as before.
pub(crate) fn change(fd: RawFd, name: &str, old: Permissions, new: Permissions) -> Result<()> {
    // Take first, then look: of two openers at the same time at least one sees
    // the other.
    let both = Permissions {
        used: old.used.with(new.used),
        shared: PermissionSet::ALL.without(old.refused().with(new.refused())),
    };
    let result = take(fd, both).and_then(|()| check(fd, new));
    match result {
        Ok(()) => {
            release(fd, both, new);
            Ok(())
        }
        Err(error) => {
            release(fd, both, old);
            let hint = format!("{error}\nIs another process using the image [{name}]?");
            Err(Error::new(ErrorKind::Locked, "lock", hint)
                .target(name)
                .with_errno(libc::EAGAIN))
        }
    }
}

/// Why a lock is not to be had, in QEMU's words.
type Conflict = String;

fn take(fd: RawFd, wanted: Permissions) -> Result<(), Conflict> {
    let used = wanted.used.bits().map(|bit| USED_BASE_BYTES + bit);
    let refused = wanted.refused().bits().map(|bit| REFUSED_BASE_BYTES + bit);
    for at in used.chain(refused) {
        sys::lock_byte(fd, at, LockAction::Share).map_err(|errno| {
            format!(
                "Failed to lock byte {at}: {}",
                crate::error::errno_text(errno)
            )
        })?;
    }
    Ok(())
}

fn check(fd: RawFd, wanted: Permissions) -> Result<(), Conflict> {
    for bit in wanted.used.bits() {
        sys::lock_byte(fd, REFUSED_BASE_BYTES + bit, LockAction::TestExclusive)
            .map_err(|_| format!("Failed to get \"{}\" lock", permission_name(bit)))?;
    }
    for bit in wanted.refused().bits() {
        sys::lock_byte(fd, USED_BASE_BYTES + bit, LockAction::TestExclusive)
            .map_err(|_| format!("Failed to get shared \"{}\" lock", permission_name(bit)))?;
    }
    Ok(())
}

/// Gives up what `held` has and `kept` has not. A failure leaves a byte locked
/// that should not be: others may be refused, nothing is harmed.
fn release(fd: RawFd, held: Permissions, kept: Permissions) {
    let used = held
        .used
        .without(kept.used)
        .bits()
        .map(|bit| USED_BASE_BYTES + bit);
    let refused = held
        .refused()
        .without(kept.refused())
        .bits()
        .map(|bit| REFUSED_BASE_BYTES + bit);
    for at in used.chain(refused) {
        let _ = sys::lock_byte(fd, at, LockAction::Release);
    }
}

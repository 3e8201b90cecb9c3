//! Locks between processes, as QEMU takes them on image files.
//!
//! Each permission has two bytes of the file: one is locked by whoever uses the
//! permission, the other by whoever does not want others to. Both locks are
//! shared ones; a conflict shows when the opposite byte turns out to be locked by
//! another open file. The locks belong to the open file description, so they
//! hold between two opens in one process too, and end when the file is closed.
//!
//! A process that is killed keeps its locks until its last request is done, since the
//! kernel holds the file so long: seconds, on a busy disk. Who opens the file next waits
//! for that (`patiently`), but never for a process that lives.

mod holders;
pub mod ranges;

use std::fmt;
use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use self::holders::{HeldLock, Holder};
use crate::sys::{self, LockAction};
use vellum_io::lane::{compute, sleep};
use vellum_io::{Error, ErrorKind, Result};

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
    /// Those of two openers in one.
    #[must_use]
    pub const fn both(self, other: Self) -> Self {
        Permissions {
            used: self.used.with(other.used),
            shared: self
                .shared
                .without(PermissionSet::ALL.without(other.shared)),
        }
    }

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

    /// A raw image that is read: others may read and write it, but not change its length.
    pub const RAW_READER: Self = Permissions {
        used: PermissionSet::CONSISTENT_READ,
        shared: PermissionSet::ALL.without(PermissionSet::RESIZE),
    };

    /// A raw image that is written without a claim to it: others may do the same, but not
    /// change its length.
    pub const RAW_WRITER: Self = Permissions {
        used: PermissionSet::CONSISTENT_READ.with(PermissionSet::WRITE),
        shared: Self::RAW_READER.shared,
    };

    /// A file that is being made: others may not make it too.
    pub const CREATOR: Self = Permissions {
        used: PermissionSet::WRITE.with(PermissionSet::RESIZE),
        shared: PermissionSet::ALL.without(PermissionSet::RESIZE),
    };

    /// Reading whatever others do (`-U`): only those conflict who deny reads.
    pub const FORCE_SHARE: Self = Permissions {
        used: PermissionSet::CONSISTENT_READ,
        shared: PermissionSet::ALL,
    };

    fn refused(self) -> PermissionSet {
        PermissionSet::ALL.without(self.shared)
    }
}

/// Why locks are not to be had.
#[derive(Debug)]
pub(crate) struct LockConflict {
    error: Error,
    /// The lock in the way, if the kernel can be asked for its holder.
    held: Option<HeldLock>,
}

impl LockConflict {
    pub(crate) fn into_error(self) -> Error {
        self.error
    }
}

/// Moves the locks of an open file from `old` to `new`; after a failure they are
/// as before.
pub(crate) fn change(
    fd: RawFd,
    name: &str,
    old: Permissions,
    new: Permissions,
) -> Result<(), LockConflict> {
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
        Err(conflict) => {
            let held = HeldLock::note(fd, conflict.at_bytes);
            release(fd, both, old);
            let message = conflict.message;
            let hint = format!("{message}\nIs another process using the image [{name}]?");
            let error = Error::new(ErrorKind::Locked, "lock", hint)
                .target(name)
                .with_errno(libc::EAGAIN);
            Err(LockConflict { error, held })
        }
    }
}

/// Takes locks on a descriptor without looking who has others: for one who knows, since
/// another descriptor of his holds them already.
pub(crate) fn take_beside(fd: RawFd, name: &str, wanted: Permissions) -> Result<(), LockConflict> {
    take(fd, wanted).map_err(|conflict| {
        release(fd, wanted, Permissions::NONE);
        let error = Error::new(ErrorKind::Locked, "lock", conflict.message).target(name);
        LockConflict { error, held: None }
    })
}

/// How long is waited for locks that no process holds any more.
const PATIENCE: Duration = Duration::from_secs(15);
/// As long where not all processes may be asked.
const PATIENCE_IF_UNKNOWN: Duration = Duration::from_secs(2);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(20);
/// After so many attempts the processes are asked again.
const ATTEMPTS: u32 = 16;

/// A wait for locks that no living process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitReason {
    /// It begins.
    Begins,
    /// It has taken too long: an error follows.
    GivenUp,
}

/// Who is told of waits, with the file's name.
pub type WaitReporter = fn(WaitReason, &str);

static WAIT_REPORTER: OnceLock<WaitReporter> = OnceLock::new();

/// Has waits for locks told to `teller`; the first call decides.
pub fn report_waits(teller: WaitReporter) {
    // A second call is one too many: the first teller stays.
    let _ = WAIT_REPORTER.set(teller);
}

/// Makes attempts to lock a file until one succeeds, as long as those in the way belong to
/// no process that lives: 15 seconds at most.
pub(crate) async fn patiently(
    name: &str,
    mut attempt: impl FnMut() -> Result<(), LockConflict>,
) -> Result<()> {
    let tell = |waiting| {
        WAIT_REPORTER
            .get()
            .into_iter()
            .for_each(|tell| tell(waiting, name))
    };
    let mut begun = None;
    loop {
        let Err(refusal) = attempt() else {
            return Ok(());
        };
        let Some(held) = refusal.held else {
            return Err(refusal.error);
        };
        let patience = match compute(move || held.holding()).await {
            Holder::Living => return Err(refusal.error),
            Holder::Nobody => PATIENCE,
            Holder::Unknown => PATIENCE_IF_UNKNOWN,
        };
        for _ in 0..ATTEMPTS {
            sleep(PAUSE).await;
            if attempt().is_ok() {
                return Ok(());
            }
        }
        match begun {
            None => tell(WaitReason::Begins),
            Some(begun) if Instant::elapsed(&begun) < patience => {}
            Some(_) => {
                tell(WaitReason::GivenUp);
                return Err(refusal.error);
            }
        }
        begun = begun.or_else(|| Some(Instant::now()));
    }
}

/// A lock that is not to be had.
struct Conflict {
    /// Why, in QEMU's words.
    message: String,
    /// The byte that somebody else has locked.
    at_bytes: u64,
}

fn take(fd: RawFd, wanted: Permissions) -> Result<(), Conflict> {
    let used = wanted.used.bits().map(|bit| USED_BASE_BYTES + bit);
    let refused = wanted.refused().bits().map(|bit| REFUSED_BASE_BYTES + bit);
    for at_bytes in used.chain(refused) {
        sys::lock_byte(fd, at_bytes, LockAction::Share).map_err(|errno| {
            let why = vellum_io::error::errno_text(errno);
            Conflict {
                message: format!("Failed to lock byte {at_bytes}: {why}"),
                at_bytes,
            }
        })?;
    }
    Ok(())
}

fn check(fd: RawFd, wanted: Permissions) -> Result<(), Conflict> {
    let test = |at_bytes, shared, bit| {
        let lock = sys::lock_byte(fd, at_bytes, LockAction::TestExclusive);
        lock.map_err(|_| Conflict {
            message: format!("Failed to get {shared}\"{}\" lock", permission_name(bit)),
            at_bytes,
        })
    };
    for bit in wanted.used.bits() {
        test(REFUSED_BASE_BYTES + bit, "", bit)?;
    }
    for bit in wanted.refused().bits() {
        test(USED_BASE_BYTES + bit, "shared ", bit)?;
    }
    Ok(())
}

/// Gives up what `held` has and `kept` has not. A failure leaves a byte locked
/// that should not be: others may be refused, nothing is harmed.
pub(crate) fn release(fd: RawFd, held: Permissions, kept: Permissions) {
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

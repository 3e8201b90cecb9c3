//! [`FileTimes`]: when a regular file was changed, and from when on a later change is sure to have
//! another time.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::Stat;

const SECOND_NANOS: i128 = 1_000_000_000;
/// Longer than a file system's clock stands still that notes fractions of a second: the kernel's tick, and the 10 ms of
/// exFAT.
const FINE_MARGIN: Duration = Duration::from_millis(50);
/// The same for one that notes whole seconds (ext4 with inodes of 128 bytes, NFS) or every other one (FAT), with room
/// for the clock of a server that differs from ours.
pub(crate) const COARSE_MARGIN: Duration = Duration::from_secs(5);

/// Which regular file it is, how long, and when it was changed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileTimes {
    device: u64,
    inode: u64,
    pub(crate) len_bytes: u64,
    pub(crate) modified_nanos: i128,
    changed_nanos: i128,
}

/// Nanoseconds since 1970.
fn nanos(seconds: i128, nanoseconds: i128) -> i128 {
    seconds * SECOND_NANOS + nanoseconds
}

impl FileTimes {
    fn of(file: &Metadata) -> Option<FileTimes> {
        file.is_file().then(|| FileTimes {
            device: file.dev(),
            inode: file.ino(),
            len_bytes: file.len(),
            modified_nanos: nanos(file.mtime().into(), file.mtime_nsec().into()),
            changed_nanos: nanos(file.ctime().into(), file.ctime_nsec().into()),
        })
    }

    /// Those of an open file.
    pub(crate) fn of_stat(stat: &Stat) -> FileTimes {
        FileTimes {
            device: stat.st_dev,
            inode: stat.st_ino,
            len_bytes: stat.st_size as u64,
            modified_nanos: nanos(stat.st_mtime.into(), stat.st_mtime_nsec.into()),
            changed_nanos: nanos(stat.st_ctime.into(), stat.st_ctime_nsec.into()),
        }
    }

    pub(crate) fn of_path(path: &Path) -> Option<FileTimes> {
        FileTimes::of(&std::fs::metadata(path).ok()?)
    }

    pub(crate) fn text(&self) -> String {
        format!(
            "{} {} {} {} {}",
            self.device, self.inode, self.len_bytes, self.modified_nanos, self.changed_nanos
        )
    }

    /// Whether the file system may note whole seconds only. That of the last change of the inode tells nothing: FAT has
    /// a finer one.
    fn is_coarse(&self) -> bool {
        self.modified_nanos % SECOND_NANOS == 0
    }

    /// How long until a later change is sure to have other times; `None`: that cannot be told, as the file was
    /// changed in the future.
    pub(crate) fn settles_in(&self, now: SystemTime) -> Option<Duration> {
        self.settles_after(self.modified_nanos.max(self.changed_nanos), now)
    }

    /// As [`FileTimes::settles_in`], of a change at `nanos`.
    fn settles_after(&self, nanos: i128, now: SystemTime) -> Option<Duration> {
        let margin = if self.is_coarse() {
            COARSE_MARGIN
        } else {
            FINE_MARGIN
        };
        let since_1970 = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let age = since_1970.as_nanos() as i128 - nanos;
        // The kernel's coarse clock is a tick behind the fine one, never ahead; whole seconds are rounded down.
        let age = u64::try_from(age).ok().map(Duration::from_nanos)?;
        Some(margin.saturating_sub(age))
    }

    /// When the content was last changed, if a later change is sure to have another time. The time of the inode does not
    /// count: it changes for other reasons, too.
    pub(crate) fn settled_modified_at(&self, now: SystemTime) -> Option<u64> {
        let left = self.settles_after(self.modified_nanos, now);
        let is_settled = !self.is_coarse() && left == Some(Duration::ZERO);
        u64::try_from(self.modified_nanos)
            .ok()
            .filter(|_| is_settled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_SECONDS: u64 = 1_800_000_000;

    fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(NOW_SECONDS)
    }

    /// Of a file that was changed so many nanoseconds before [`now`].
    fn changed_before(age_nanos: i128) -> FileTimes {
        let at = i128::from(NOW_SECONDS) * SECOND_NANOS - age_nanos;
        FileTimes {
            device: 1,
            inode: 2,
            len_bytes: 3,
            modified_nanos: at,
            changed_nanos: at,
        }
    }

    #[test]
    fn times_count_once_a_later_change_has_others() {
        let in_nanos = |age| {
            let wait = changed_before(age).settles_in(now());
            wait.map(|wait| wait.as_nanos())
        };
        assert_eq!(in_nanos(50_000_001), Some(0));
        assert_eq!(in_nanos(10_000_001), Some(39_999_999));
        // Whole seconds: the file system may know no others.
        assert_eq!(in_nanos(SECOND_NANOS), Some(4_000_000_000));
        assert_eq!(in_nanos(5 * SECOND_NANOS), Some(0));
        assert_eq!(in_nanos(-1), None, "changed in the future");
        // A time that somebody has set says nothing of when that was.
        let mut set = changed_before(10_000_001);
        set.modified_nanos -= 3600 * SECOND_NANOS;
        assert_ne!(set.settles_in(now()), Some(Duration::ZERO));
    }

    #[test]
    fn whole_seconds_do_not_tell_when_a_file_was_left() {
        let at = |age| changed_before(age).settled_modified_at(now());
        assert!(at(50_000_001).is_some());
        assert_eq!(at(10_000_001), None, "it may be changed in the same tick");
        assert_eq!(at(3600 * SECOND_NANOS), None);
    }
}

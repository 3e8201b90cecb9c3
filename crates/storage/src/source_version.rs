//! [`SourceVersion`]: what tells the bytes of a source from those that it had or will have.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::Stat;
use vellum_io::lane;

use crate::file::AsFile;
use crate::storage::Storage;

const SECOND_NANOS: i128 = 1_000_000_000;
/// Longer than a file system's clock stands still that notes fractions of a second: the kernel's tick, and the 10 ms of
/// exFAT.
const FINE_MARGIN: Duration = Duration::from_millis(50);
/// The same for one that notes whole seconds (ext4 with inodes of 128 bytes, NFS) or every other one (FAT), with room
/// for the clock of a server that differs from ours.
const COARSE_MARGIN: Duration = Duration::from_secs(5);

/// The version of a source's bytes.
///
/// `Unknown` compares unequal to everything, itself included: a source whose version is unknown has to be taken for
/// changed. That is why there is no `Eq` and no `Hash`.
#[derive(Debug, Clone)]
pub enum SourceVersion {
    /// Two sources of one name with this version have the same bytes.
    Known(String),
    /// Nothing rules out that the bytes change, or have changed, unnoticed.
    Unknown,
}

impl PartialEq for SourceVersion {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (SourceVersion::Known(one), SourceVersion::Known(other)) => one == other,
            _ => false,
        }
    }
}

impl From<Option<String>> for SourceVersion {
    fn from(version: Option<String>) -> Self {
        version.map_or(SourceVersion::Unknown, SourceVersion::Known)
    }
}

impl SourceVersion {
    /// The version in words, if it is known.
    pub fn known(self) -> Option<String> {
        match self {
            SourceVersion::Known(version) => Some(version),
            SourceVersion::Unknown => None,
        }
    }

    /// Returns the version that a storage has now: its own ([`Storage::version`]) or that of the regular file that it
    /// stands on. Waits as [`SourceVersion::of_path`].
    pub async fn of_storage(storage: &dyn Storage) -> SourceVersion {
        if let known @ SourceVersion::Known(_) = storage.version() {
            return known;
        }
        if let Some(file) = storage.as_file() {
            return settled(|| file.times()).await;
        }
        // Of what hides its file the name is all that there is. It has to name what is below: a node of a server may
        // be called as a file is.
        let path = Path::new(storage.name());
        let is_below = |times: &FileTimes| {
            let modified_at = storage.modified_at().ok().flatten();
            let len_bytes = storage.len_bytes().ok();
            modified_at.map(i128::from) == Some(times.modified_nanos)
                && len_bytes == Some(times.len_bytes)
        };
        settled(|| FileTimes::of_path(path).filter(is_below)).await
    }

    /// Returns the version of a regular file. Of one that was changed a moment ago, within the granularity of its file
    /// system's clock, a later change could have the same times: then this waits until it cannot, at most some seconds.
    pub async fn of_path(path: &Path) -> SourceVersion {
        settled(|| FileTimes::of_path(path)).await
    }
}

/// Whether a time of last change that a server gives in whole seconds tells the version: a change from `now` on, by the
/// server's clock, has another one.
pub fn tells_version(modified: SystemTime, now: SystemTime) -> bool {
    now.duration_since(modified)
        .is_ok_and(|age| age >= COARSE_MARGIN)
}

/// Looks at a file's times until no later change can have the same ones.
async fn settled(look: impl Fn() -> Option<FileTimes>) -> SourceVersion {
    let mut left = 2 * COARSE_MARGIN;
    loop {
        let Some(times) = look() else {
            return SourceVersion::Unknown;
        };
        match times.settles_in(SystemTime::now()) {
            Some(Duration::ZERO) => return SourceVersion::Known(times.text()),
            Some(wait) if wait <= left => {
                left -= wait;
                lane::sleep(wait).await;
            }
            // It is changed all the time, or the clocks disagree.
            _ => return SourceVersion::Unknown,
        }
    }
}

/// Which regular file it is, how long, and when it was changed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileTimes {
    device: u64,
    inode: u64,
    len_bytes: u64,
    modified_nanos: i128,
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

    fn of_path(path: &Path) -> Option<FileTimes> {
        FileTimes::of(&std::fs::metadata(path).ok()?)
    }

    fn text(&self) -> String {
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
    fn settles_in(&self, now: SystemTime) -> Option<Duration> {
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
    use std::fs::{File, FileTimes as SetTimes};
    use std::sync::Arc;

    use vellum_io::lane::block_on;

    use super::*;
    use crate::{FileOptions, FileStorage, MemStorage, delegate};

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
    fn an_unknown_version_equals_nothing() {
        let known = |text: &str| SourceVersion::Known(text.to_owned());
        assert_eq!(known("1"), known("1"));
        assert_ne!(known("1"), known("2"));
        assert_ne!(known("1"), SourceVersion::Unknown);
        assert_ne!(SourceVersion::Unknown, SourceVersion::Unknown);
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

    #[test]
    fn a_servers_time_counts_some_seconds_later() {
        let tells = |age| tells_version(now() - Duration::from_secs(age), now());
        assert!(!tells(0) && !tells(2) && tells(5));
        assert!(!tells_version(now() + Duration::from_secs(60), now()));
    }

    #[test]
    fn a_file_of_whole_seconds_is_not_told_by_them() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let set = |at| {
            let file = File::options().write(true).open(path.path()).unwrap();
            file.set_times(SetTimes::new().set_modified(at)).unwrap();
            FileStorage::open(path.path(), &FileOptions::default().read_only(true)).unwrap()
        };
        // Long ago, with and without a fraction.
        let file = set(UNIX_EPOCH + Duration::from_secs(1_000_000_000));
        assert_eq!(file.modified_at().unwrap(), None);
        let file = set(UNIX_EPOCH + Duration::from_nanos(1_000_000_000_000_000_001));
        block_on(async {
            let before = SourceVersion::of_storage(&*file).await;
            assert_eq!(file.modified_at().unwrap(), Some(1_000_000_000_000_000_001));
            assert_eq!(before, SourceVersion::of_path(path.path()).await);
            std::fs::write(path.path(), b"x").unwrap();
            assert_ne!(before, SourceVersion::of_storage(&*file).await);
        });
    }

    /// A storage around another one.
    #[derive(Debug)]
    struct Around {
        name: String,
        inner: Arc<dyn Storage>,
    }

    impl Storage for Around {
        delegate!(
            inner: len_bytes, modified_at, read, write, write_zeroes, flush, truncate
        );

        fn name(&self) -> &str {
            &self.name
        }
    }

    /// A node may have the name of a file and nothing to do with it.
    #[test]
    fn a_name_alone_tells_no_version() {
        let path = tempfile::NamedTempFile::new().unwrap();
        block_on(async {
            let known = SourceVersion::of_path(path.path()).await;
            let around = |inner| Around {
                name: path.path().to_string_lossy().into_owned(),
                inner,
            };
            let memory = around(Arc::new(MemStorage::new()));
            assert!(SourceVersion::of_storage(&memory).await.known().is_none());
            let options = FileOptions::default().read_only(true);
            let file = around(FileStorage::open(path.path(), &options).unwrap());
            assert_eq!(SourceVersion::of_storage(&file).await, known);
            let gone = path.path().with_extension("gone");
            assert!(SourceVersion::of_path(&gone).await.known().is_none());
        });
    }
}

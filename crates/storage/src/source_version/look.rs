//! The version that a file, or the file below a storage, has now.

use std::path::Path;
use std::time::{Duration, SystemTime};

use vellum_io::lane;

use super::SourceVersion;
use crate::file::AsFile;
use crate::file::times::{COARSE_MARGIN, FileTimes};
use crate::storage::Storage;

impl SourceVersion {
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

#[cfg(test)]
mod tests {
    use std::fs::{File, FileTimes as SetTimes};
    use std::sync::Arc;
    use std::time::UNIX_EPOCH;

    use vellum_io::lane::block_on;

    use super::*;
    use crate::{FileOptions, FileStorage, MemStorage, delegate};

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

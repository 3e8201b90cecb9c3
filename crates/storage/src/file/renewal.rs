//! A file that is opened anew stays locked: the locks pass from the old descriptor to the new one.
//!
//! Invariant: the old descriptor holds what either of the two needs, and nobody else has anything
//! against it, before the new one takes its locks; so at no moment can another opener get in
//! between. The old locks end with the old descriptor.

use std::path::PathBuf;
use std::sync::Arc;

use super::open::OpenedFile;
use super::{FileOptions, FileStorage};
use crate::lock::{self, LockConflict, Permissions};
use vellum_io::Result;

impl FileStorage {
    /// Opens the same file once more, whatever its name leads to by now. It has no locks, whatever
    /// `options` say of them: see [`FileStorage::take_over_locks`].
    ///
    /// # Errors
    /// What the system says.
    pub fn open_anew(&self, options: &FileOptions) -> Result<Arc<Self>> {
        let fd = self.file.descriptor.raw();
        let path = PathBuf::from(format!("/proc/self/fd/{fd}"));
        let unlocked = options.clone().locks(super::Locks::Unlocked);
        let opening = OpenedFile::begin_as(&path, self.file.name().to_owned(), &unlocked)?;
        Self::opened(opening, &unlocked)
    }

    /// Takes the locks that a use needs, for a file that `old` holds locks of: these are held
    /// until `old` is gone. Waits as [`FileStorage::open_patiently`] does.
    ///
    /// # Errors
    /// As [`FileStorage::open_patiently`]. Nothing has changed then.
    pub async fn take_over_locks(&self, old: &FileStorage, permissions: Permissions) -> Result<()> {
        let attempt = || self.try_to_take_over(old, permissions);
        lock::patiently(self.file.name(), attempt).await
    }

    /// As [`FileStorage::take_over_locks`], without waiting.
    ///
    /// # Errors
    /// As [`FileStorage::set_permissions`]. Nothing has changed then.
    pub fn take_over_locks_at_once(
        &self,
        old: &FileStorage,
        permissions: Permissions,
    ) -> Result<()> {
        let taken = self.try_to_take_over(old, permissions);
        taken.map_err(LockConflict::into_error)
    }

    fn try_to_take_over(
        &self,
        old: &FileStorage,
        permissions: Permissions,
    ) -> Result<(), LockConflict> {
        let Some(held) = old.locks.wanted() else {
            // It was open without any.
            return self.try_permissions(permissions);
        };
        let fd = self.file.descriptor.raw();
        let own = self.locks.wanted();
        if let Some(own) = own {
            // They are in the way of those of the old file, which has the same.
            lock::release(fd, own, Permissions::NONE);
        }
        let taken = old.locks.change(held.both(permissions));
        let taken = taken.and_then(|()| lock::take_beside(fd, self.file.name(), permissions));
        if let Err(conflict) = taken {
            // A failure leaves `old` with more than it had, which harms nobody.
            let _ = old.locks.change(held);
            if let Some(own) = own {
                lock::take_beside(fd, self.file.name(), own)?;
            }
            return Err(conflict);
        }
        self.locks.note(permissions);
        self.note_permissions(permissions);
        Ok(())
    }

    /// Whether both are the same file of the system.
    pub fn is_same_file(&self, other: &FileStorage) -> bool {
        self.device_and_inode() == other.device_and_inode()
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::ErrorKind;
    use vellum_io::lane::block_on;

    use super::*;
    use crate::Storage;
    use crate::file::Locks;

    fn file() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [7; 4096]).unwrap();
        (folder, path)
    }

    /// Whether somebody else may write to the file, as a shared writer of a raw image.
    fn is_free(path: &PathBuf, permissions: Permissions) -> bool {
        let options = FileOptions::default().locks(Locks::Of(permissions));
        FileStorage::open(path, &options).is_ok()
    }

    #[test]
    fn a_file_that_is_opened_anew_is_never_free() {
        let (_folder, path) = file();
        block_on(async {
            let reading = FileOptions::default().read_only(true);
            let old = FileStorage::open(&path, &reading).unwrap();
            assert!(!is_free(&path, Permissions::RAW_WRITER));
            let new = old.open_anew(&FileOptions::default()).unwrap();
            new.take_over_locks(&old, Permissions::WRITER)
                .await
                .unwrap();
            assert!(!is_free(&path, Permissions::READER));
            drop(old);
            assert!(!is_free(&path, Permissions::READER));
            // And back.
            let reader = new.open_anew(&reading).unwrap();
            reader
                .take_over_locks(&new, Permissions::READER)
                .await
                .unwrap();
            assert!(!is_free(&path, Permissions::READER));
            drop(new);
            assert!(is_free(&path, Permissions::READER));
            assert!(!is_free(&path, Permissions::RAW_WRITER));
        });
    }

    #[test]
    fn a_file_that_others_read_is_not_taken_for_writing() {
        let (_folder, path) = file();
        block_on(async {
            let reading = FileOptions::default().read_only(true);
            let old = FileStorage::open(&path, &reading).unwrap();
            let other = FileStorage::open(&path, &reading).unwrap();
            let new = old.open_anew(&FileOptions::default()).unwrap();
            let taken = new.take_over_locks(&old, Permissions::WRITER).await;
            assert_eq!(taken.unwrap_err().kind(), ErrorKind::Locked);
            drop(new);
            // Nothing of the attempt is left.
            assert!(is_free(&path, Permissions::READER));
            drop(other);
            let new = old.open_anew(&FileOptions::default()).unwrap();
            new.take_over_locks(&old, Permissions::WRITER)
                .await
                .unwrap();
        });
    }

    #[test]
    fn it_is_the_same_file_though_its_name_leads_elsewhere() {
        let (_folder, path) = file();
        let old = FileStorage::open(&path, &FileOptions::default()).unwrap();
        std::fs::rename(&path, path.with_extension("old")).unwrap();
        std::fs::write(&path, [8; 1]).unwrap();
        let new = old.open_anew(&FileOptions::default()).unwrap();
        assert_eq!(new.len_bytes().unwrap(), 4096);
        assert_eq!(new.name(), path.to_str().unwrap());
        assert!(new.is_same_file(&old));
    }
}

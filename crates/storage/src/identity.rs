//! [`StorageIdentity`]: which bytes a storage stands for.

use std::any::Any;

use crate::{AsFile, Storage};

/// Tells the storages of a program apart, as long as they are open. Two that are equal hold the same
/// bytes at the same offsets; two that differ may do so too.
///
/// A name does not do: one URL shows what the cookie, the key or the server that goes with it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StorageIdentity(Place);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    /// A file of this system, however often it is open.
    File { device: u64, inode: u64 },
    /// What is the same only as long as it is the same object.
    Object(usize),
}

impl StorageIdentity {
    /// That of a storage, or of the one whose bytes it passes on as they are.
    pub fn of(storage: &dyn Storage) -> StorageIdentity {
        if let Some(file) = storage.as_file() {
            let (device, inode) = file.device_and_inode();
            return StorageIdentity(Place::File { device, inode });
        }
        StorageIdentity(Place::Object(match storage.transparent_storage() {
            Some(same) => std::ptr::from_ref::<dyn Any>(same).addr(),
            None => std::ptr::from_ref::<dyn Storage>(storage).addr(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{FileOptions, FileStorage, MemStorage};

    #[test]
    fn a_file_is_itself_by_any_name_and_memory_only_as_the_same_object() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("a"), folder.path().join("b"));
        std::fs::write(&path, [7; 512]).unwrap();
        std::fs::hard_link(&path, &link).unwrap();
        let options = FileOptions::default().read_only(true);
        let open = |path| FileStorage::open(path, &options).unwrap();
        let (one, two) = (open(&path), open(&link));
        assert_eq!(StorageIdentity::of(&*one), StorageIdentity::of(&*two));

        std::fs::rename(&path, folder.path().join("c")).unwrap();
        std::fs::write(&path, [7; 512]).unwrap();
        let other = open(&path);
        assert_ne!(StorageIdentity::of(&*one), StorageIdentity::of(&*other));

        let (memory, same_name) = (Arc::new(MemStorage::new()), MemStorage::new());
        let again = memory.clone();
        assert_eq!(StorageIdentity::of(&*memory), StorageIdentity::of(&*again));
        assert_ne!(
            StorageIdentity::of(&*memory),
            StorageIdentity::of(&same_name)
        );
    }
}

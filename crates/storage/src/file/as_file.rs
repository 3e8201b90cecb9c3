//! [`AsFile`]: the file that a storage is.

use super::FileStorage;
use crate::Storage;

/// Storages that may be files.
pub trait AsFile: Storage {
    /// The file that this storage is, or whose bytes it passes on as they are
    /// ([`Storage::transparent_storage`]).
    fn as_file(&self) -> Option<&FileStorage>;
}

impl<T: Storage + ?Sized> AsFile for T {
    fn as_file(&self) -> Option<&FileStorage> {
        self.transparent_storage()?.downcast_ref()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{FileOptions, MemStorage, delegate};

    #[derive(Debug)]
    struct Around(Arc<dyn Storage>);

    impl Storage for Around {
        delegate!(
            0: name, len_bytes, read, write, write_zeroes, flush, truncate, transparent_storage,
        );
    }

    #[test]
    fn a_file_is_found_below_what_passes_it_on() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let file = FileStorage::open(path.path(), &FileOptions::default()).unwrap();
        assert!(std::ptr::eq(file.as_file().unwrap(), &*file));
        let around: Arc<dyn Storage> = Arc::new(Around(file.clone()));
        assert!(std::ptr::eq(around.as_file().unwrap(), &*file));
        assert!(Around(Arc::new(MemStorage::new())).as_file().is_none());
    }
}

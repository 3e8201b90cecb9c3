//! Where old bytes of a backup wait for a slow target: a file of its own, of bounded size, encrypted
//! with a key that only this process has.

use std::sync::Arc;

use vellum::luks::EncryptedStorage;
use vellum::{BlockDevice, Raw, RawOptions, Result, Storage};
use vellum_graph::Nodes;
use vellum_jobs::live::{FleeceOptions, WhenFull};
use vellum_storage::MemStorage;
use vellum_storage::file::{Create, FileOptions, FileStorage};

/// Bytes that wait at most, unless somebody says how many.
const MAX_BYTES: u64 = 1 << 30;

/// How old bytes wait.
#[derive(Debug, Clone)]
pub(crate) struct Fleecing {
    /// Where the file is made; `None` for a directory for temporary files.
    pub(crate) directory: Option<String>,
    pub(crate) max_bytes: u64,
    pub(crate) when_full: WhenFull,
}

impl Default for Fleecing {
    fn default() -> Self {
        Fleecing {
            directory: None,
            max_bytes: MAX_BYTES,
            when_full: WhenFull::Wait,
        }
    }
}

impl Fleecing {
    /// Makes the place for a device. `None`: the directory that nobody has named does not take
    /// the file, and users of the device wait for the target.
    pub(super) async fn make(
        &self,
        nodes: &Nodes,
        size_bytes: u64,
    ) -> Result<Option<FleeceOptions>> {
        let storage: Arc<dyn Storage> = match nodes.files() {
            // The files of the caller are no place for what must not outlive the program.
            Some(_) => Arc::new(MemStorage::new()),
            None => match (self.make_file(), &self.directory) {
                (Ok(file), _) => file,
                (Err(error), Some(_)) => return Err(error),
                (Err(_), None) => return Ok(None),
            },
        };
        match (storage.truncate(size_bytes).await, &self.directory) {
            (Ok(()), _) => {}
            (Err(error), Some(_)) => return Err(error),
            (Err(_), None) => return Ok(None),
        }
        // It lies on another disk than the source, which may be encrypted, and so may the target.
        let storage = Arc::new(EncryptedStorage::scratch(storage)?);
        let device: Arc<dyn BlockDevice> = Raw::open(storage, RawOptions::default())?;
        Ok(Some(FleeceOptions {
            device,
            max_bytes: self.max_bytes,
            when_full: self.when_full,
        }))
    }

    /// A file without a name, which ends with its last user.
    fn make_file(&self) -> Result<Arc<dyn Storage>> {
        let directory = match &self.directory {
            Some(directory) => directory.into(),
            None => std::env::var_os("TMPDIR").unwrap_or_else(|| "/var/tmp".into()),
        };
        let failed = |error: std::io::Error| {
            let error = vellum::Error::from_io("create", &error);
            error.context("backup", "Could not create a file for what waits")
        };
        let name = tempfile::Builder::new()
            .prefix("vellum-fleece.")
            .tempfile_in(&directory)
            .map_err(failed)?
            .into_temp_path();
        let options = FileOptions::default()
            .create(Create::Truncate)
            .discard(true);
        // Its name goes when this returns.
        let file = FileStorage::open(&name, &options)?;
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use vellum::{Buffer, RequestFlags};
    use vellum_io::lane::block_on;

    use super::*;

    /// What the files hold that were made in a folder, have no name, and are open here.
    fn files_of(folder: &std::path::Path) -> Vec<Vec<u8>> {
        let open = std::fs::read_dir("/proc/self/fd").expect("the list of open files");
        let open = open.filter_map(|entry| Some(entry.ok()?.path()));
        let mine = open
            .filter(|path| std::fs::read_link(path).is_ok_and(|target| target.starts_with(folder)));
        mine.map(|path| std::fs::read(path).expect("a file"))
            .collect()
    }

    #[test]
    fn what_waits_lies_nowhere_in_the_clear() {
        let folder = tempfile::tempdir().expect("a folder");
        let fleecing = Fleecing {
            directory: Some(folder.path().display().to_string()),
            ..Fleecing::default()
        };
        block_on(async {
            let made = fleecing.make(&Nodes::live(), 1 << 20).await;
            let device = made.expect("a file").expect("a place").device;
            assert!(device.info().has_zero_init, "zeroes are not written there");
            let bytes = Buffer::copy_of(&[b'S'; 65536]);
            let written = device.write(65536, bytes, RequestFlags::default());
            written.await.expect("written");
            device.flush().await.expect("flushed");
            let files = files_of(folder.path());
            assert!(!files.is_empty());
            for file in &files {
                assert!(file.iter().any(|byte| *byte != 0), "it is there");
                assert!(!file.windows(8).any(|bytes| bytes == [b'S'; 8]));
            }
            let read = device.read(0, Buffer::for_read(1 << 20)).await;
            let read = read.expect("what waits");
            assert!(read[65536..131_072].iter().all(|byte| *byte == b'S'));
            assert!(read[..65536].iter().all(|byte| *byte == 0));
            device.close().await.expect("closed");
        });
    }
}

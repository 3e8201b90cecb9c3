//! Where the images of a disk lie: a folder in memory, which may have a file system of its own, so
//! that this can be full.

use std::path::{Path, PathBuf};
use std::sync::Once;

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// A folder in memory, where the machine has one.
const MEMORY_FOLDER: &str = "/dev/shm";
/// Of the file system: the images of a disk, those that it has left, its backups, and what is read of them. With
/// less, these alone could fill it, and requests that wait for room would wait for ever.
const ROOM: &std::ffi::CStr = c"size=512M";

/// A folder, which goes with this value.
pub struct Place {
    folder: Option<tempfile::TempDir>,
    is_mounted: bool,
}

impl Place {
    /// In memory, or in the target folder.
    pub fn new(target: &Path) -> Result<Place> {
        let mut builder = tempfile::Builder::new();
        builder.prefix("vellum-torture-");
        let folder = builder
            .tempdir_in(MEMORY_FOLDER)
            .or_else(|_| builder.tempdir_in(target))
            .context("cannot make a temporary folder")?;
        Ok(Place {
            folder: Some(folder),
            is_mounted: false,
        })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.folder.as_ref().map_or(Path::new(""), |it| it.path())
    }

    /// Gives the folder a small file system of its own; `false` if only root may.
    pub fn mount(&mut self) -> Result<bool> {
        static TOLD: Once = Once::new();
        match mount("none", self.path(), "tmpfs", MountFlags::empty(), ROOM) {
            Ok(()) => self.is_mounted = true,
            Err(rustix::io::Errno::PERM) => {
                TOLD.call_once(|| {
                    println!("torture: no full file systems, which only root can have")
                });
            }
            Err(error) => return Err(error).context("cannot mount a tmpfs"),
        }
        Ok(self.is_mounted)
    }

    /// Leaves it where it is.
    pub fn keep(mut self) -> PathBuf {
        self.is_mounted = false;
        self.folder.take().map(|it| it.keep()).unwrap_or_default()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_mounted {
            // If it fails, the folder cannot be removed, which is seen.
            let _ = unmount(self.path(), UnmountFlags::DETACH);
        }
    }
}

//! A small file system, which may become larger.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};

/// With less free space than this the file system counts as full: no cluster and L2 table fit.
const NO_ROOM_BYTES: u64 = 128 << 10;
/// How long it stays full, so that requests have to wait.
const FULL_FOR: Duration = Duration::from_secs(5);
const LOOK_PAUSE: Duration = Duration::from_millis(100);

/// A tmpfs, unmounted with this value.
pub struct Thin {
    path: PathBuf,
}

fn size_option(bytes: u64) -> Result<std::ffi::CString> {
    Ok(std::ffi::CString::new(format!("size={bytes}"))?)
}

impl Thin {
    /// Mounts one below `folder`; `None` if only root may.
    pub fn mount(folder: &Path, bytes: u64) -> Result<Option<Thin>> {
        let path = folder.join("thin");
        std::fs::create_dir(&path)?;
        let option = size_option(bytes)?;
        match mount(
            "none",
            &path,
            "tmpfs",
            MountFlags::empty(),
            option.as_c_str(),
        ) {
            Ok(()) => Ok(Some(Thin { path })),
            Err(rustix::io::Errno::PERM) => Ok(None),
            Err(error) => Err(error).context("cannot mount a tmpfs"),
        }
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn left_bytes(&self) -> Result<u64> {
        let left = rustix::fs::statvfs(&self.path)?;
        Ok(left.f_bavail * left.f_frsize)
    }

    /// Waits until it is full, and some time more; then makes it larger.
    pub fn grow_once_full(
        &mut self,
        bytes: u64,
        limit: Duration,
        mut has_ended: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let deadline = Instant::now() + limit;
        while self.left_bytes()? > NO_ROOM_BYTES {
            if Instant::now() > deadline || has_ended()? {
                bail!("the file system has not become full");
            }
            std::thread::sleep(LOOK_PAUSE);
        }
        std::thread::sleep(FULL_FOR);
        let option = size_option(bytes)?;
        mount_remount(&self.path, MountFlags::empty(), option.as_c_str())
            .context("cannot make the file system larger")
    }
}

impl Drop for Thin {
    fn drop(&mut self) {
        // If it fails, the folder cannot be removed, which is seen.
        let _ = unmount(&self.path, UnmountFlags::DETACH);
    }
}

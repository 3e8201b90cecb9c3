//! The folder that a run writes to, and the signals that interrupt a run.
//!
//! Invariant: everything that a run writes lies in one new folder, which is removed when the
//! [`Scratch`] is dropped. A signal only sets a flag ([`Interrupt`]), so it is removed then too.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::TempDir;
use vellum_io::error::io_text;

use super::failure::Failure;
use crate::size::human;

/// Whether the user has asked for the end (Ctrl-C).
#[derive(Debug, Clone, Default)]
pub(super) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Takes the signals that would end the program.
    pub(super) fn catch() -> Result<Interrupt, Failure> {
        let interrupt = Interrupt::default();
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            signal_hook::flag::register(signal, interrupt.0.clone()).map_err(|error| {
                Failure::Message(format!("Cannot catch signals: {}", io_text(&error)))
            })?;
        }
        Ok(interrupt)
    }

    pub(super) fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// An error if the end was asked for.
    pub(super) fn check(&self) -> Result<(), Failure> {
        match self.is_asked() {
            true => Err(Failure::Interrupted),
            false => Ok(()),
        }
    }
}

/// A new folder for the images.
#[derive(Debug)]
pub(super) struct Scratch {
    folder: TempDir,
}

impl Scratch {
    /// Makes a folder in `directory` if the file system has `needed_bytes` free.
    pub(super) fn new(directory: &Path, needed_bytes: u64) -> Result<Scratch, Failure> {
        let shown = directory.display();
        let failed = |error: std::io::Error| {
            Failure::Message(format!("Cannot use '{shown}': {}", io_text(&error)))
        };
        let stat = rustix::fs::statvfs(directory).map_err(|errno| failed(errno.into()))?;
        let free_bytes = stat.f_bavail.saturating_mul(stat.f_frsize);
        if free_bytes < needed_bytes {
            return Failure::message(format!(
                "Not enough space in '{shown}': {} are needed, {} are free. Choose another \
                 folder with --dir, or smaller images with --size",
                human(needed_bytes),
                human(free_bytes)
            ));
        }
        let folder = tempfile::Builder::new()
            .prefix("vellum-bench-")
            .tempdir_in(directory)
            .map_err(failed)?;
        Ok(Scratch { folder })
    }

    /// The path of a file in the folder.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Removes the folder now, where an error can still be told.
    pub(super) fn remove(self) -> Result<(), Failure> {
        let path = self.folder.path().to_owned();
        self.folder.close().map_err(|error| {
            let text = io_text(&error);
            Failure::Message(format!("Cannot remove '{}': {text}", path.display()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_space_is_told_and_nothing_made() {
        let place = tempfile::tempdir().unwrap();
        let Err(Failure::Message(failure)) = Scratch::new(place.path(), u64::MAX) else {
            panic!("there is no such disk");
        };
        assert!(failure.contains("16 EiB are needed"), "{failure}");
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_folder_goes_with_its_owner() {
        let place = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(place.path(), 0).unwrap();
        std::fs::write(scratch.path("x"), "x").unwrap();
        drop(scratch);
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    }
}

//! A directory in which the files of a file system appear, to be read.
//!
//! `messages` is what the kernel says and is told, `serve` answers it. What a file is, is asked of
//! the [`FileSystem`] each time by the number that this has given it: there is no table of files
//! that the kernel knows, whatever it looks at.
//!
//! File systems block, so threads that may block serve: some at a time, each one request.

mod messages;
mod serve;

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use event_listener::Event;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;
use vellum_files::FileSystem;
use vellum_io::{Error, Result};

use super::mount::{self, Kind, Mount};
use super::{AllowOther, answer_greeting};
use crate::nbd::Stop;

/// Threads that serve, if nothing else is said.
const THREADS: usize = 4;

vellum_io::with_setters! {
    /// How files are shown.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct TreeOptions {
        /// What is shown as the source of the mount, for people.
        pub source: String,
        /// Who may use it. Others may do what the files' modes say; the user who mounts may read
        /// everything, unless others may do anything.
        pub allow_other: AllowOther,
        /// Threads that serve it.
        pub threads: usize,
    }
}

impl Default for TreeOptions {
    fn default() -> Self {
        TreeOptions {
            source: "vellum".to_owned(),
            allow_other: AllowOther::Off,
            threads: THREADS,
        }
    }
}

/// Files that are mounted.
pub struct TreeExport {
    mountpoint: PathBuf,
    mount: Mutex<Mount>,
    shared: Arc<Shared>,
}

/// What the threads share.
struct Shared {
    files: Arc<dyn FileSystem>,
    /// The way to the kernel; it does not block.
    kernel: OwnedFd,
    /// Readable as soon as the threads are to end.
    stop: OwnedFd,
    running: AtomicUsize,
    ended: Event,
    unmounted: Stop,
}

impl TreeExport {
    /// Mounts `files` over the directory `mountpoint` and serves them. Whatever a server that died
    /// has left mounted there is taken away first. Blocks until it is mounted.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](vellum_io::ErrorKind::InvalidArgument) if `mountpoint` is no
    /// directory; else as [`Export::new`](super::Export::new).
    pub fn new(
        files: Arc<dyn FileSystem>,
        mountpoint: impl Into<PathBuf>,
        options: &TreeOptions,
    ) -> Result<TreeExport> {
        let mountpoint = mountpoint.into();
        mount::prepare(&mountpoint, Kind::Tree)?;
        let mounted = mount::mount(
            Kind::Tree,
            &mountpoint,
            &options.source,
            options.allow_other,
            true,
        )?;
        let (mount, kernel, _) = mounted;
        serve::greet(&kernel)?;
        let failed = |errno: rustix::io::Errno| Error::from_errno("mount", errno.raw_os_error());
        rustix::fs::fcntl_setfl(&kernel, OFlags::NONBLOCK).map_err(failed)?;
        let export = TreeExport {
            mountpoint,
            mount: Mutex::new(mount),
            shared: Arc::new(Shared {
                files,
                kernel,
                stop: eventfd(0, EventfdFlags::CLOEXEC).map_err(failed)?,
                running: AtomicUsize::new(0),
                ended: Event::new(),
                unmounted: Stop::new(),
            }),
        };
        for number in 0..options.threads.max(1) {
            let shared = export.shared.clone();
            shared.running.fetch_add(1, Ordering::SeqCst);
            let thread = std::thread::Builder::new().name(format!("vellum-files-{number}"));
            let started = thread.spawn(move || run(&shared));
            if let Err(error) = started {
                export.shared.running.fetch_sub(1, Ordering::SeqCst);
                // Fewer do as well.
                if number == 0 {
                    return Err(Error::no_thread(&error));
                }
                break;
            }
        }
        Ok(export)
    }

    /// Where they are mounted.
    pub fn mountpoint(&self) -> &std::path::Path {
        &self.mountpoint
    }

    /// What is requested as soon as somebody else has unmounted them.
    pub fn unmounted(&self) -> Stop {
        self.shared.unmounted.clone()
    }

    /// Unmounts them. The file system is not used any more on return; files that are open cannot
    /// be read any more.
    pub async fn end(&self) {
        if self.shared.unmounted.is_requested() {
            self.mount.lock().is_gone();
        }
        self.mount.lock().end();
        // It fails only if the number in it is too large, and it is none.
        let _ = rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes());
        while self.shared.running.load(Ordering::SeqCst) > 0 {
            let ended = self.shared.ended.listen();
            if self.shared.running.load(Ordering::SeqCst) > 0 {
                ended.await;
            }
        }
    }
}

impl fmt::Debug for TreeExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TreeExport")
            .field("mountpoint", &self.mountpoint)
            .finish_non_exhaustive()
    }
}

impl Drop for TreeExport {
    fn drop(&mut self) {
        self.mount.lock().end();
        let _ = rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes());
    }
}

/// A thread's life.
fn run(shared: &Shared) {
    if serve::serve(&shared.kernel, &shared.stop, &*shared.files) == serve::End::Unmounted {
        shared.unmounted.request();
    }
    shared.running.fetch_sub(1, Ordering::SeqCst);
    shared.ended.notify(usize::MAX);
}

//! Going to the background (`--fork`, `--daemonize`).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

/// Which process this is after [`fork`].
pub enum Side {
    /// The caller's: it waits for the other one.
    Parent(Parent),
    /// The one that goes on in the background.
    Child(Ready),
}

/// Waits for the child to be ready.
pub struct Parent(File);

/// Tells the parent that the child is ready.
pub struct Ready(File);

/// Splits off a process in a session of its own. Must be called before any
/// thread is started.
pub fn fork() -> io::Result<Side> {
    let (reader, writer) = io::pipe()?;
    // SAFETY: the program has no other threads yet, so the child may go on with
    // everything that the parent could do.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(reader);
            // It fails only for the leader of a process group, which a new child is not.
            let _ = rustix::process::setsid();
            Ok(Side::Child(Ready(OwnedFd::from(writer).into())))
        }
        _ => {
            drop(writer);
            Ok(Side::Parent(Parent(OwnedFd::from(reader).into())))
        }
    }
}

impl Parent {
    /// Waits; `false` if the child ended without being ready, and has told the user why.
    pub fn wait(mut self) -> bool {
        self.0.read_exact(&mut [0]).is_ok()
    }
}

impl Ready {
    /// Leaves the terminal (all but errors, if `keep_errors`) and lets the parent go.
    pub fn notify_parent(mut self, keep_errors: bool) -> io::Result<()> {
        let null = File::options().read(true).write(true).open("/dev/null")?;
        dup2_stdin(&null)?;
        dup2_stdout(&null)?;
        if !keep_errors {
            dup2_stderr(&null)?;
        }
        self.0.write_all(&[1])
    }
}

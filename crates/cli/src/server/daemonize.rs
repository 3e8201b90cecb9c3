//! Going to the background (`--fork`, `--daemonize`).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use rustix::process::{Pid, WaitOptions, waitpid};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use vellum_io::error::io_text;

use super::Failure;

/// Which process this is after [`daemonize`].
pub enum Process {
    /// The one that serves; what it was given tells its parent, if it has one, that it is ready.
    Server(Option<Ready>),
    /// The one that the user started: the server is ready, and there is nothing left to do.
    Parent,
}

/// Tells the parent that the child is ready.
pub struct Ready(File);

/// Splits off a process in a session of its own, if that is wanted, and waits in the parent until it
/// is ready. Must be called before any thread is started.
pub fn daemonize(wanted: bool) -> Result<Process, Failure> {
    if !wanted {
        return Ok(Process::Server(None));
    }
    let failed = |e| Failure::message(format!("Failed to fork: {}", io_text(&e)));
    let (reader, writer) = io::pipe().map_err(failed)?;
    // SAFETY: the program has no other threads yet, so the child may go on with
    // everything that the parent could do.
    match unsafe { libc::fork() } {
        -1 => Err(failed(io::Error::last_os_error())),
        0 => {
            drop(reader);
            // It fails only for the leader of a process group, which a new child is not.
            let _ = rustix::process::setsid();
            Ok(Process::Server(Some(Ready(OwnedFd::from(writer).into()))))
        }
        child => {
            drop(writer);
            if File::from(OwnedFd::from(reader))
                .read_exact(&mut [0])
                .is_ok()
            {
                return Ok(Process::Parent);
            }
            // It is about to say why.
            let _ = waitpid(Pid::from_raw(child), WaitOptions::empty());
            Err(Failure::AlreadyReported)
        }
    }
}

impl Ready {
    /// Leaves the terminal (all but errors, if `keep_errors`) and lets the parent go.
    pub fn notify_parent(self, keep_errors: bool) -> Result<(), Failure> {
        let failed = |e| Failure::message(format!("Failed to daemonize: {}", io_text(&e)));
        self.leave_terminal(keep_errors).map_err(failed)
    }

    fn leave_terminal(mut self, keep_errors: bool) -> io::Result<()> {
        let null = File::options().read(true).write(true).open("/dev/null")?;
        dup2_stdin(&null)?;
        dup2_stdout(&null)?;
        if !keep_errors {
            dup2_stderr(&null)?;
        }
        self.0.write_all(&[1])
    }
}

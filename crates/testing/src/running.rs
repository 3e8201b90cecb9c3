//! Programs in the background.

use std::io::Read;
use std::process::{Child, Command, ExitStatus};

use crate::wait::until;
use crate::{Said, Words};

/// A program in the background, which is killed when this is dropped.
#[derive(Debug)]
pub struct Running {
    /// The process. Its pipes, if it was given any, are here.
    pub child: Child,
}

impl Running {
    /// Starts a program.
    #[track_caller]
    pub fn start(command: &mut Command) -> Running {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{name}: {error}; run `cargo xtask setup`"));
        Running { child }
    }

    /// The process's number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal, such as `-TERM`.
    #[track_caller]
    pub fn signal(&self, name: &str) {
        signal(self.id(), name);
    }

    /// Whether the program has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_some()
    }

    /// Waits until the program ends.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        until("the program ends", || {
            status = self.child.try_wait().expect("a child");
            status.is_some()
        });
        status.expect("as was seen")
    }

    /// Waits until the program ends by itself, with exit code 0.
    #[track_caller]
    pub fn wait_for_success(mut self) {
        let status = self.wait();
        assert!(status.success(), "{status}");
    }

    /// Waits until the program ends: how it did, and what it printed to its pipes.
    #[track_caller]
    pub fn said(mut self) -> (ExitStatus, Said) {
        let errors = self.child.stderr.take();
        let errors = std::thread::spawn(|| text(errors));
        let out = text(self.child.stdout.take());
        let err = errors.join().expect("it reads");
        let status = self.wait();
        let code = status.code();
        (status, Said { code, out, err })
    }

    /// Ends the program as a service manager does: SIGTERM, and then exit code 0.
    #[track_caller]
    pub fn end(self) {
        self.signal("-TERM");
        self.wait_for_success();
    }

    /// Kills the program.
    pub fn kill(mut self) {
        self.child.kill().expect("a child");
        self.child.wait().expect("a child");
    }
}

/// All that comes from a pipe, if there is one.
fn text(pipe: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(mut pipe) = pipe {
        pipe.read_to_end(&mut bytes).expect("a pipe");
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended already, unless a test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal, such as `-TERM`, to a process.
#[track_caller]
pub fn signal(id: u32, name: &str) {
    let words = format!("{name} {id}");
    let said = Said::of(Command::new("kill").args(words.as_str().words()));
    assert_eq!(said.code, Some(0), "kill {words}: {}", said.err);
}

//! A folder in which command lines are run.

use std::fs::File;
use std::ops::Deref;
use std::process::{Child, Stdio};
use std::time::Duration;

use vellum_testing::{Folder, within};

pub const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

pub struct Place(Folder);

impl Deref for Place {
    type Target = Folder;

    fn deref(&self) -> &Folder {
        &self.0
    }
}

impl Place {
    pub fn new() -> Place {
        Place(Folder::new(VELLUM))
    }

    /// Starts the program with its standard input from a file.
    pub fn start(&self, words: &str, input: &str) -> Child {
        let input = File::open(self.path(input)).expect("an input");
        let mut command = self.command("vellum", words);
        let command = command.stdin(input).stderr(Stdio::piped());
        command.spawn().expect("the program runs")
    }

    /// The files whose names begin so, in order.
    pub fn files(&self, start: &str) -> Vec<String> {
        let mut names = self.names();
        names.retain(|name| name.starts_with(start));
        names
    }
}

/// Waits until something holds.
#[track_caller]
pub fn until(what: &str, holds: impl FnMut() -> bool) {
    within(Duration::from_secs(120), what, holds);
}

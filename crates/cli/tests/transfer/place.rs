//! A folder in which command lines are run.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

pub const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

pub struct Place(TempDir);

impl Place {
    pub fn new() -> Place {
        Place(tempfile::tempdir().expect("a folder"))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn shell(&self, line: &str) -> Command {
        let mut command = Command::new("bash");
        command.args(["-c", &format!("set -o pipefail; {line}")]);
        command.current_dir(self.0.path()).stdin(Stdio::null());
        command.env("VELLUM", VELLUM).env("LC_ALL", "C");
        command
    }

    fn output(&self, line: &str) -> Output {
        self.shell(line).output().expect("bash")
    }

    /// Runs a line that must succeed; what it prints.
    #[track_caller]
    pub fn done(&self, line: &str) -> String {
        let output = self.output(line);
        assert!(output.status.success(), "{line}: {output:?}");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Runs a line that must fail with exit code 1; what it says.
    #[track_caller]
    pub fn fails(&self, line: &str) -> String {
        let output = self.output(line);
        assert_eq!(output.status.code(), Some(1), "{line}: {output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Starts the program with its standard input from a file.
    pub fn start(&self, words: &str, input: &str) -> Child {
        let input = std::fs::File::open(self.path(input)).expect("an input");
        let mut command = Command::new(VELLUM);
        command.args(words.split_whitespace()).stdin(input);
        command.current_dir(self.0.path()).stderr(Stdio::piped());
        command.spawn().expect("the program runs")
    }

    /// The files whose names begin so, in order.
    pub fn files(&self, start: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).unwrap().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut names: Vec<String> = names.filter(|name| name.starts_with(start)).collect();
        names.sort();
        names
    }
}

/// Waits until something holds.
#[track_caller]
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(120), "not {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

//! Two folders with the same files, one for each family of tools.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::answer::{Answer, output_lines};
use crate::images;

/// The programs that Vellum stands for.
const PROGRAMS: [&str; 3] = ["qemu-img", "qemu-io", "qemu-nbd"];
/// A command line that takes longer hangs.
const LIMIT_SECONDS: &str = "60";

/// What tells whether a file has changed.
type Stamp = (u64, u64, i64, i64);

/// The twin folders.
pub struct Twins {
    root: TempDir,
    held: Vec<Child>,
    /// Nothing has been compared yet: only the folder of the real tools is prepared.
    fresh: bool,
    seen: [BTreeMap<String, Stamp>; 2],
}

/// The folders: of the same length, since some texts are padded.
const FOLDERS: [&str; 2] = ["qemu", "ours"];
const OURS: usize = 1;

impl Twins {
    /// Two empty folders.
    pub fn new() -> Twins {
        let root = tempfile::tempdir().expect("a temporary folder");
        for folder in FOLDERS {
            std::fs::create_dir(root.path().join(folder)).expect("a folder");
        }
        let bin = root.path().join("bin");
        std::fs::create_dir(&bin).expect("a folder");
        for program in PROGRAMS {
            symlink(env!("CARGO_BIN_EXE_vellum"), bin.join(program)).expect("a link");
        }
        Twins {
            root,
            held: Vec::new(),
            fresh: true,
            seen: [BTreeMap::new(), BTreeMap::new()],
        }
    }

    fn folder(&self, which: usize) -> PathBuf {
        self.root.path().join(FOLDERS[which])
    }

    /// A shell that runs a command line in one of the folders, with the tools of `tools`.
    fn shell(&self, which: usize, tools: usize, command: &str) -> Command {
        let mut shell = Command::new("timeout");
        shell
            .args(["--foreground", LIMIT_SECONDS, "sh", "-c", command])
            .current_dir(self.folder(which))
            .env("LC_ALL", "C")
            .stdin(Stdio::null());
        if tools == OURS {
            let path = std::env::var("PATH").unwrap_or_default();
            let bin = self.root.path().join("bin");
            shell.env("PATH", format!("{}:{path}", bin.display()));
        }
        shell
    }

    /// Runs a command line of the real tools for both folders: before the first comparison
    /// in one, of which the other becomes a copy.
    pub fn prepare(&mut self, command: &str) -> Result<(), String> {
        let folders = if self.fresh { 1 } else { FOLDERS.len() };
        for which in 0..folders {
            let output = self.shell(which, 0, command).output();
            let output = output.map_err(|error| format!("{command}: {error}"))?;
            if !output.status.success() {
                let text = String::from_utf8_lossy(&output.stderr).into_owned();
                return Err(format!("{command}: {}{text}", output.status));
            }
            self.seen[which] = stamps(&self.folder(which));
        }
        Ok(())
    }

    /// Makes our folder what the other one was prepared to be.
    fn copy_once(&mut self) {
        if !std::mem::take(&mut self.fresh) {
            return;
        }
        // Holes stay holes, and blocks of zeroes blocks.
        let pack = "tar --create --sparse --hole-detection=seek --directory=qemu .";
        let copied = Command::new("sh")
            .args(["-c", &format!("{pack} | tar --extract --directory=ours")])
            .current_dir(self.root.path())
            .status();
        assert!(copied.is_ok_and(|status| status.success()), "tar");
        self.seen = [0, OURS].map(|which| stamps(&self.folder(which)));
    }

    /// Opens an image with the real `qemu-io` in both folders, for as long as they exist.
    pub fn hold(&mut self, arguments: &str) -> Result<(), String> {
        self.copy_once();
        for which in 0..FOLDERS.len() {
            let mut child = Command::new("qemu-io")
                .args(arguments.split_whitespace())
                .current_dir(self.folder(which))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .map_err(|error| format!("qemu-io: {error}; run `cargo xtask setup`"))?;
            let mut answer = String::new();
            let (input, output) = (child.stdin.as_mut(), child.stdout.as_mut());
            if let (Some(input), Some(output)) = (input, output) {
                // Its answer is the sign that it has opened the image.
                let _ = input.write_all(b"length\n");
                let _ = BufReader::new(output).read_line(&mut answer);
            }
            self.held.push(child);
            if !answer.contains("iB") {
                return Err(format!("qemu-io {arguments}: {answer}"));
            }
        }
        Ok(())
    }

    /// Runs a command line with both: their answer and ours.
    pub fn both(&mut self, command: &str) -> (Answer, Answer) {
        self.copy_once();
        let mut answers = [0, OURS].map(|which| self.run(which, command));
        let now = [0, OURS].map(|which| stamps(&self.folder(which)));
        for name in changed_names(&self.seen, &now) {
            let folders = [0, OURS].map(|which| self.folder(which));
            let described = images::describe(&name, &folders);
            for (answer, lines) in answers.iter_mut().zip(described) {
                answer.extend(lines);
            }
        }
        self.seen = now;
        let [theirs, ours] = answers;
        (theirs, ours)
    }

    fn run(&self, which: usize, command: &str) -> Answer {
        let output = self.shell(which, which, command).output();
        let output = output.expect("a shell");
        let folder = self.folder(which).display().to_string();
        let mut answer = output_lines("out", &output.stdout, &folder);
        answer.extend(output_lines("err", &output.stderr, &folder));
        match output.status.code() {
            Some(0) => {}
            code => answer.push(format!("code: {}", code.unwrap_or(-1))),
        }
        answer
    }
}

impl Drop for Twins {
    fn drop(&mut self) {
        for child in &mut self.held {
            // It ends by itself when its input does; either is fine.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The files of a folder and of those in it.
fn stamps(folder: &Path) -> BTreeMap<String, Stamp> {
    let mut found = BTreeMap::new();
    let mut folders = vec![String::new()];
    while let Some(prefix) = folders.pop() {
        let entries = std::fs::read_dir(folder.join(&prefix)).expect("a folder");
        for entry in entries.flatten() {
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            let Ok(metadata) = std::fs::symlink_metadata(entry.path()) else {
                continue;
            };
            if metadata.is_dir() {
                folders.push(format!("{name}/"));
            }
            let stamp = (
                metadata.ino(),
                metadata.size(),
                metadata.mtime(),
                metadata.mtime_nsec(),
            );
            found.insert(name, stamp);
        }
    }
    found
}

/// Files that changed, came or went on either side.
fn changed_names(
    before: &[BTreeMap<String, Stamp>; 2],
    now: &[BTreeMap<String, Stamp>; 2],
) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for (before, now) in before.iter().zip(now) {
        let all = before.keys().chain(now.keys());
        names.extend(
            all.filter(|name| before.get(*name) != now.get(*name))
                .cloned(),
        );
    }
    names.sort();
    names.dedup();
    names
}

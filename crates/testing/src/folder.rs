//! A temporary folder in which programs run, and what these print.

use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::{Running, Words};

/// What a program printed, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// `None` if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Said {
    /// Runs a program to its end.
    #[track_caller]
    pub fn of(command: &mut Command) -> Said {
        let name = command.get_program().to_string_lossy().into_owned();
        let output = command.output();
        let output =
            output.unwrap_or_else(|error| panic!("{name}: {error}; run `cargo xtask setup`"));
        Said::from(&output)
    }

    /// This, which must have ended with that exit code.
    #[track_caller]
    pub fn expect(self, code: i32) -> Said {
        assert_eq!(self.code, Some(code), "{self:?}");
        self
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Standard output and standard error, one behind the other.
    pub fn all(&self) -> String {
        format!("{}{}", self.out, self.err)
    }
}

impl From<&Output> for Said {
    fn from(output: &Output) -> Said {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Said {
            code: output.status.code(),
            out: text(&output.stdout),
            err: text(&output.stderr),
        }
    }
}

/// A temporary folder in which programs run.
///
/// A program is named as in PATH; `vellum` is the one under test, and `our qemu-img` that one by a link of
/// that name.
#[derive(Debug)]
pub struct Folder {
    folder: TempDir,
    /// Links to the program under test, by QEMU's names.
    links: TempDir,
    vellum: PathBuf,
}

impl Folder {
    /// An empty folder for tests of the program `vellum`.
    pub fn new(vellum: impl Into<PathBuf>) -> Folder {
        let folder = || tempfile::tempdir().expect("a temporary folder");
        Folder {
            folder: folder(),
            links: folder(),
            vellum: vellum.into(),
        }
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        self.folder.path()
    }

    /// The path of a file.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The path of a file, as an argument.
    pub fn name(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Whether there is a file.
    pub fn has(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    /// What a file holds.
    #[track_caller]
    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// What a file holds, which is text.
    #[track_caller]
    pub fn text(&self, name: &str) -> String {
        String::from_utf8(self.read(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Writes a file.
    #[track_caller]
    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.path(name), bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    /// Overwrites bytes of a file, as damage does.
    #[track_caller]
    pub fn damage(&self, name: &str, offset_bytes: u64, bytes: &[u8]) {
        let file = fs::OpenOptions::new().write(true).open(self.path(name));
        let written = file.and_then(|file| file.write_all_at(bytes, offset_bytes));
        written.unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    /// Removes a file.
    #[track_caller]
    pub fn remove(&self, name: &str) {
        fs::remove_file(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    /// The length of a file in bytes.
    #[track_caller]
    pub fn len_bytes(&self, name: &str) -> u64 {
        let metadata = self.path(name).metadata();
        metadata
            .unwrap_or_else(|error| panic!("{name}: {error}"))
            .len()
    }

    /// The names of all files, sorted.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.root()).expect("a folder").flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    /// Makes a link to the program under test in the folder.
    pub fn link(&self, name: &str) {
        symlink(&self.vellum, self.path(name)).expect("a link");
    }

    /// The program under test by a link of this name.
    pub fn own(&self, name: &str) -> PathBuf {
        let link = self.links.path().join(name);
        match symlink(&self.vellum, &link) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                panic!("{name}: {error}")
            }
            _ => link,
        }
    }

    /// A program that runs here.
    pub fn command(&self, program: &str, words: impl Words) -> Command {
        let mut command = match (program, program.strip_prefix("our ")) {
            ("vellum", _) => Command::new(&self.vellum),
            (_, Some(name)) => Command::new(self.own(name)),
            (_, None) => Command::new(program),
        };
        command.args(words.words()).current_dir(self.root());
        command.env("LC_ALL", "C").stdin(Stdio::null());
        command
    }

    /// Runs a program to its end.
    #[track_caller]
    pub fn run(&self, program: &str, words: impl Words) -> Said {
        Said::of(&mut self.command(program, words))
    }

    /// Runs a program that must succeed; what it prints.
    #[track_caller]
    pub fn must(&self, program: &str, words: impl Words) -> String {
        let mut command = self.command(program, words);
        let said = Said::of(&mut command);
        assert_eq!(said.code, Some(0), "{command:?}: {}", said.all());
        said.out
    }

    /// Runs a program that must fail with exit code 1; what it reports.
    #[track_caller]
    pub fn refused(&self, program: &str, words: impl Words) -> String {
        let mut command = self.command(program, words);
        let said = Said::of(&mut command);
        assert_eq!(said.code, Some(1), "{command:?}: {}", said.all());
        said.err
    }

    /// Runs `qemu-img`, which must succeed; what it prints.
    #[track_caller]
    pub fn img(&self, words: impl Words) -> String {
        self.must("qemu-img", words)
    }

    /// Runs commands of `qemu-io` on an image; they must succeed, and no pattern may differ.
    #[track_caller]
    pub fn io(&self, image: impl Words, commands: &[impl AsRef<str>]) -> String {
        self.io_by("qemu-io", image, commands)
    }

    /// As [`Folder::io`], by another program with those commands; `vellum` stands for `vellum io`.
    #[track_caller]
    pub fn io_by(&self, program: &str, image: impl Words, commands: &[impl AsRef<str>]) -> String {
        let verb = (program == "vellum").then_some("io");
        let commands = commands.iter().flat_map(|command| ["-c", command.as_ref()]);
        let words = verb.into_iter().chain(commands);
        let mut words: Vec<String> = words.map(str::to_owned).collect();
        words.extend(image.words());
        let said = self.must(program, &words);
        assert!(!said.contains("failed"), "{words:?}: {said}");
        said
    }

    /// Starts a program in the background.
    #[track_caller]
    pub fn start(&self, program: &str, words: impl Words) -> Running {
        Running::start(&mut self.command(program, words))
    }

    /// A line for a shell, in which `$VELLUM` is the program under test, and one stage that fails fails a pipe.
    pub fn shell_command(&self, line: &str) -> Command {
        let mut command = self.command("bash", &["-o", "pipefail", "-c", line]);
        command.env("VELLUM", &self.vellum);
        command
    }

    /// A line for a shell, on a terminal of its own (`script` makes one).
    pub fn terminal_command(&self, line: &str) -> Command {
        let mut command = self.command("script", &["-qec", line, "/dev/null"]);
        command.env("VELLUM", &self.vellum).env("TERM", "xterm");
        command.env_remove("NO_COLOR");
        command
    }

    /// Runs a line in a shell.
    #[track_caller]
    pub fn shell(&self, line: &str) -> Said {
        Said::of(&mut self.shell_command(line))
    }

    /// Starts a line in a shell, in the background. Without its `exec` of a program a signal ends the shell alone.
    #[track_caller]
    pub fn start_shell(&self, line: &str) -> Running {
        Running::start(&mut self.shell_command(line))
    }

    /// Runs a line in a shell, which must succeed; what it prints, without the last line's end.
    #[track_caller]
    pub fn done(&self, line: &str) -> String {
        let said = self.shell(line);
        assert_eq!(said.code, Some(0), "{line}: {said:?}");
        said.out.trim().to_owned()
    }

    /// Runs a line in a shell, which must fail with exit code 1; what it reports.
    #[track_caller]
    pub fn fails(&self, line: &str) -> String {
        let said = self.shell(line);
        assert_eq!(said.code, Some(1), "{line}: {said:?}");
        said.err
    }
}

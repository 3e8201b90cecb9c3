//! Two folders alike, one for us and one for QEMU.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

const MISSING: &str = "QEMU's programs are not installed; run `cargo xtask setup`";

/// What a run printed, without times, and how it ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub code: Option<i32>,
    pub output: Vec<String>,
    pub errors: Vec<String>,
}

pub fn run(program: &Path, folder: &Path, words: &[&str]) -> Answer {
    let output = Command::new(program)
        .args(words)
        .current_dir(folder)
        .output()
        .expect(MISSING);
    let lines = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes).into_owned();
        let steady = |line: &str| line.split(" ops; ").next().unwrap_or(line).to_owned();
        text.lines().map(steady).collect()
    };
    Answer {
        code: output.status.code(),
        output: lines(&output.stdout),
        errors: lines(&output.stderr),
    }
}

/// Two folders with the same files: `disk` (qcow2), `raw` and `copy` (zeroes), `log` (empty).
pub struct Twins {
    root: TempDir,
}

impl Twins {
    pub fn new() -> Twins {
        let root = tempfile::tempdir().expect("a temporary folder");
        for folder in ["ours", "theirs"] {
            let folder = root.path().join(folder);
            std::fs::create_dir(&folder).expect("a folder");
            for name in ["raw", "copy"] {
                std::fs::write(folder.join(name), vec![0; 1 << 20]).expect("a file");
            }
            std::fs::write(folder.join("log"), b"").expect("a file");
            let create = ["create", "-q", "-f", "qcow2", "disk", "1M"];
            let made = run(Path::new("qemu-img"), &folder, &create);
            assert_eq!(made.code, Some(0), "{made:?}");
        }
        for tool in ["qemu-io", "qemu-img"] {
            let link = root.path().join(tool);
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_vellum"), link).expect("a link");
        }
        Twins { root }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        for folder in ["ours", "theirs"] {
            std::fs::write(self.path(folder).join(name), text).expect("a file");
        }
    }

    /// Runs both tools on an image: the words that name it, then commands.
    #[track_caller]
    pub fn same(&self, image: &[&str], commands: &[&str]) -> Answer {
        let mut words: Vec<&str> = Vec::new();
        for command in commands {
            words.extend(["-c", command]);
        }
        words.extend(image);
        let ours = run(&self.path("qemu-io"), &self.path("ours"), &words);
        let theirs = run(Path::new("qemu-io"), &self.path("theirs"), &words);
        assert_eq!(ours, theirs, "left: vellum, right: qemu-io, for {words:?}");
        ours
    }

    /// Runs both image tools.
    #[track_caller]
    pub fn same_img(&self, words: &[&str]) -> Answer {
        let ours = run(&self.path("qemu-img"), &self.path("ours"), words);
        let theirs = run(Path::new("qemu-img"), &self.path("theirs"), words);
        assert_eq!(ours, theirs, "left: vellum, right: qemu-img, for {words:?}");
        ours
    }

    /// As [`Twins::same`], with the image as options.
    #[track_caller]
    pub fn options(&self, options: &str, commands: &[&str]) -> Answer {
        self.same(&["--image-opts", options], commands)
    }

    /// A file's bytes, which must be the same in both folders.
    #[track_caller]
    pub fn same_bytes(&self, name: &str) -> Vec<u8> {
        let read = |folder: &str| std::fs::read(self.path(folder).join(name)).expect("a file");
        let (ours, theirs) = (read("ours"), read("theirs"));
        assert!(ours == theirs, "{name} differs");
        ours
    }

    /// What both print on standard output. (Errors at the close are worded otherwise.)
    #[track_caller]
    pub fn options_output(&self, options: &str, commands: &[&str]) -> Vec<String> {
        let mut words: Vec<&str> = commands.iter().flat_map(|c| ["-c", c]).collect();
        words.extend(["--image-opts", options]);
        let ours = run(&self.path("qemu-io"), &self.path("ours"), &words);
        let theirs = run(Path::new("qemu-io"), &self.path("theirs"), &words);
        assert_eq!(
            ours.output, theirs.output,
            "left: vellum, right: qemu-io, for {words:?}"
        );
        ours.output
    }
}

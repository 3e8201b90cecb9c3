//! A folder in which our programs and QEMU's are run, and what they said. Other tests that run both
//! take it from here.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Output};

use tempfile::TempDir;

/// Runs a program to its end; a missing one is an error that says what to do.
pub fn output(command: &mut Command) -> Output {
    let name = command.get_program().to_string_lossy().into_owned();
    command.output().unwrap_or_else(|error| match error.kind() {
        ErrorKind::NotFound => panic!("{name} is missing: run `cargo xtask setup`"),
        _ => panic!("{name}: {error}"),
    })
}

/// What a program has said and how it ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Said {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// A folder with our programs under QEMU's names.
pub struct Place {
    pub folder: TempDir,
}

impl Place {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join("bin")).expect("a folder");
        for name in ["qemu-img", "qemu-io", "qemu-nbd"] {
            let link = folder.path().join("bin").join(name);
            symlink(env!("CARGO_BIN_EXE_vellum"), link).expect("a link");
        }
        Place { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn run(&self, program: &str, words: &[&str]) -> Said {
        let program = match program.strip_prefix("our ") {
            Some(name) => self.path("bin").join(name),
            None => PathBuf::from(program),
        };
        let mut command = Command::new(program);
        let done = output(command.current_dir(self.folder.path()).args(words));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Said {
            code: done.status.code(),
            out: text(&done.stdout),
            err: text(&done.stderr),
        }
    }

    /// Runs a program that must succeed.
    pub fn good(&self, program: &str, words: &[&str]) -> String {
        let said = self.run(program, words);
        assert_eq!(said.code, Some(0), "{program} {words:?}: {}", said.err);
        said.out
    }
}

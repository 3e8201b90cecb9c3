//! Runs the tools in one folder and records the commands, so that a difference can be printed as a
//! shell script.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::scenario::Tool;
use crate::process;

/// How long one tool may take before it counts as hung.
const LIMIT_SECONDS: &str = "120";
const TIMED_OUT: i32 = 124;

/// The programs that are compared.
#[derive(Debug, Clone)]
pub struct Programs {
    /// The program under test.
    pub vellum: PathBuf,
    qemu_img: PathBuf,
    qemu_io: PathBuf,
    qemu_nbd: PathBuf,
    nbdinfo: PathBuf,
    timeout: PathBuf,
    cp: PathBuf,
}

impl Programs {
    /// Finds QEMU's programs beside the one under test.
    pub fn find(vellum: PathBuf) -> Result<Programs> {
        let find = |name: &str| {
            process::find_program(name)
                .with_context(|| format!("{name} is not installed; run `cargo xtask setup`"))
        };
        Ok(Programs {
            vellum: vellum
                .canonicalize()
                .with_context(|| format!("cannot find {}", vellum.display()))?,
            qemu_img: find("qemu-img")?,
            qemu_io: find("qemu-io")?,
            qemu_nbd: find("qemu-nbd")?,
            nbdinfo: find("nbdinfo")?,
            timeout: find("timeout")?,
            cp: find("cp")?,
        })
    }

    /// A message without the name of the program that it begins with, which is the name
    /// of the program's file, and under our own name the command.
    fn made_alike(&self, line: &str) -> String {
        if let Some((command, rest)) = line
            .strip_prefix("vellum ")
            .and_then(|l| l.split_once(": "))
            && !command.contains(' ')
        {
            return format!("vellum: {rest}");
        }
        let programs = [&self.vellum, &self.qemu_img, &self.qemu_io];
        let names = programs
            .iter()
            .filter_map(|path| path.file_name()?.to_str());
        let rest = names
            .filter_map(|name| line.strip_prefix(name)?.strip_prefix(": "))
            .next();
        rest.map_or_else(|| line.to_owned(), |rest| format!("vellum: {rest}"))
    }
}

/// What a tool printed, and its exit code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The exit code.
    pub code: i32,
    /// Standard output without the lines that tell times.
    pub output: String,
    /// Standard error, with the names of the programs made alike.
    pub errors: String,
}

/// Runs tools in one folder.
#[derive(Debug)]
pub struct Runner<'a> {
    programs: &'a Programs,
    folder: &'a Path,
    /// The commands so far, as lines of a shell script.
    pub script: Vec<String>,
}

impl<'a> Runner<'a> {
    /// A runner with an empty script.
    pub fn new(programs: &'a Programs, folder: &'a Path) -> Self {
        Runner {
            programs,
            folder,
            script: Vec::new(),
        }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        self.folder
    }

    /// The program under test.
    pub fn vellum(&self) -> &Path {
        &self.programs.vellum
    }

    /// `qemu-img` or its counterpart.
    pub fn img(&mut self, tool: Tool, words: &[String]) -> Result<Answer> {
        match tool {
            Tool::Vellum => self.run("vellum", &self.programs.vellum, words),
            Tool::Qemu => self.run("qemu-img", &self.programs.qemu_img, words),
        }
    }

    /// `qemu-io` or its counterpart.
    pub fn io(&mut self, tool: Tool, words: &[String]) -> Result<Answer> {
        match tool {
            Tool::Vellum => {
                let words = [&["io".to_owned()], words].concat();
                self.run("vellum", &self.programs.vellum, &words)
            }
            Tool::Qemu => self.run("qemu-io", &self.programs.qemu_io, words),
        }
    }

    /// What a bitmap of an image holds, as a client of `qemu-nbd` or its counterpart
    /// sees it.
    pub fn dirty(&mut self, tool: Tool, image: &str, bitmap: &str) -> Result<Answer> {
        let server = match tool {
            Tool::Vellum => vec![self.programs.vellum.as_path(), Path::new("nbd")],
            Tool::Qemu => vec![self.programs.qemu_nbd.as_path()],
        };
        let mut words = vec![
            format!("--map=qemu:dirty-bitmap:{bitmap}"),
            "--".to_owned(),
            "[".to_owned(),
        ];
        words.extend(server.iter().map(|word| word.display().to_string()));
        words.extend(["-r", "-f", "qcow2", "-B", bitmap, image, "]"].map(str::to_owned));
        self.run("nbdinfo", &self.programs.nbdinfo, &words)
    }

    /// As [`Runner::img`], where only success will do.
    pub fn img_done(&mut self, tool: Tool, words: &[String]) -> Result<()> {
        let answer = self.img(tool, words)?;
        if answer.code != 0 {
            bail!(
                "exit code {}: {}{}",
                answer.code,
                answer.output,
                answer.errors
            );
        }
        Ok(())
    }

    /// Copies a file of the folder, and leaves its holes holes.
    pub fn copy_file(&mut self, from: &str, to: &str) -> Result<()> {
        let answer = self.run("cp", &self.programs.cp, &[from, to].map(str::to_owned))?;
        ensure!(answer.code == 0, "{}", answer.errors);
        Ok(())
    }

    fn run(&mut self, name: &str, program: &Path, words: &[String]) -> Result<Answer> {
        let mut shown = Command::new(name);
        self.script.push(process::shown(shown.args(words)));
        let mut command = Command::new(&self.programs.timeout);
        command
            .args(["-k", "5", LIMIT_SECONDS])
            .arg(program)
            .args(words);
        let output = process::capture(command.current_dir(self.folder))?;
        let code = output.status.code().unwrap_or(-1);
        if code == TIMED_OUT {
            bail!("{name} did not end within {LIMIT_SECONDS} s");
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let kept = text.lines().filter(|line| !line.contains(" ops; "));
        let errors = String::from_utf8_lossy(&output.stderr);
        Ok(Answer {
            code,
            output: kept.map(|line| format!("{line}\n")).collect(),
            errors: errors
                .split_inclusive('\n')
                .map(|line| self.programs.made_alike(line))
                .collect(),
        })
    }
}

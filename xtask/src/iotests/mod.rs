//! `cargo xtask iotests`: QEMU's own tests of qcow2 with our programs in the place
//! of QEMU's.
//!
//! With `--format NAME` the images of the tests are of that format instead.
//!
//! With `--protocol fuse` the images of the tests are exports of the storage daemon's, files on
//! which the image's own bytes appear.
//!
//! With `--machine PROGRAM` the tests are run that start a machine and need none: PROGRAM takes its
//! command line, and starts the storage daemon that `QSD_PROG` names. With `--beside` too, tests are run
//! that need a machine: they fail, and must print with our programs what they print with QEMU's.
//!
//! The suite comes from Debian's source package at run time; nothing of it is kept
//! in this repository. `tests/iotests.txt` and those beside it say which of its
//! tests are run, which of them fail and why, and which cannot apply. The task fails if a
//! test that should pass does not, and also if one that should fail passes: then the list
//! is stale.

mod beside;
mod leftovers;
mod list;
mod suite;
mod supervised;
mod tools;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use lexopt::{Arg, ValueExt as _};

use crate::setup;
use crate::workspace::Workspace;
use leftovers::Leftovers;
use list::{Expectation, List};
use suite::Suite;
use supervised::{Outcome, Verdict};
use tools::{Program, Tools};

const TIME_LIMIT: Duration = Duration::from_secs(180);
/// Where the suite's images lie: on a disk, because it asks for direct I/O.
const WORK_PARENT: &str = "/var/tmp";

/// The tests in which the storage daemon can stand for a machine.
const MACHINE_LIST_FILE: &str = "tests/iotests-qsd.txt";

/// The tests in which it cannot.
const BESIDE_LIST_FILE: &str = "tests/iotests-vm.txt";

/// Formats other than qcow2; each has a list of its tests.
const FORMATS: [&str; 10] = [
    "bochs",
    "cloop",
    "dmg",
    "parallels",
    "qcow",
    "qed",
    "vdi",
    "vhdx",
    "vmdk",
    "vpc",
];

/// Between the format and the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Protocol {
    File,
    /// Every image that a test uses is an export of type `fuse` of the storage daemon's.
    Fuse,
}

impl Protocol {
    fn list_file(self) -> &'static str {
        match self {
            Self::File => "tests/iotests.txt",
            Self::Fuse => "tests/iotests-fuse.txt",
        }
    }

    /// What `check` is told.
    fn option(self) -> &'static str {
        match self {
            Self::File => "-file",
            Self::Fuse => "-fuse",
        }
    }
}

impl FromStr for Protocol {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "file" => Ok(Self::File),
            "fuse" => Ok(Self::Fuse),
            other => bail!("--protocol takes file and fuse, not '{other}'"),
        }
    }
}

struct Arguments {
    /// One of [`FORMATS`].
    format: Option<String>,
    protocol: Protocol,
    machine: Option<PathBuf>,
    /// What tests print is compared with what they print with QEMU's programs.
    beside: bool,
    vellum: Option<PathBuf>,
    real: BTreeSet<Program>,
    source: Option<PathBuf>,
    image_options: Option<String>,
    time_limit: Duration,
    tests: Vec<String>,
}

/// The task.
pub fn run(parser: lexopt::Parser) -> Result<()> {
    let arguments = parse(parser)?;
    let workspace = Workspace::locate()?;
    let list_file = list_file(&arguments)?;
    let list = List::read(&workspace.root.join(&list_file))?;
    setup::ensure()?;
    let vellum = match &arguments.vellum {
        Some(path) => std::path::absolute(path)?,
        None => workspace.build_vellum()?,
    };
    let suite = Suite::find_or_fetch(arguments.source.as_deref())?;
    let work = tempfile::Builder::new()
        .prefix("vellum-iotests-")
        .tempdir_in(WORK_PARENT)
        .with_context(|| format!("cannot make a folder in {WORK_PARENT}"))?;
    let folder = work.path().join("tools");
    let machine = arguments.machine.as_deref();
    let tools = Tools::lay_out(&folder, &vellum, &arguments.real, machine)?;
    let real = match arguments.beside {
        true => {
            let folder = work.path().join("real");
            let all = Program::ALL.into_iter().collect();
            Some(Tools::lay_out(&folder, &vellum, &all, machine)?)
        }
        false => None,
    };
    let campaign = Campaign {
        suite: &suite,
        tools: &tools,
        real: real.as_ref(),
        work: work.path(),
        results: workspace.fresh_folder("iotests")?,
        leftovers: Leftovers::adopt()?,
        format: arguments.format.as_deref().unwrap_or("qcow2"),
        protocol: arguments.protocol,
        list_file,
        image_options: arguments.image_options.as_deref(),
        time_limit: arguments.time_limit,
    };
    let tests = match arguments.tests.is_empty() {
        true => list.names_to_run(),
        false => arguments.tests,
    };
    campaign.play(&list, &tests)
}

/// The list of the tests that are run.
fn list_file(arguments: &Arguments) -> Result<String> {
    let has_machine = arguments.machine.is_some();
    let list_file = match &arguments.format {
        Some(_) if has_machine || arguments.protocol != Protocol::File => {
            bail!("--format takes neither --machine nor --protocol")
        }
        Some(format) => format!("tests/iotests-{format}.txt"),
        None if has_machine && arguments.beside => BESIDE_LIST_FILE.to_owned(),
        None if has_machine => MACHINE_LIST_FILE.to_owned(),
        None if arguments.beside => bail!("--beside needs --machine"),
        None => arguments.protocol.list_file().to_owned(),
    };
    Ok(list_file)
}

fn parse(mut parser: lexopt::Parser) -> Result<Arguments> {
    let mut arguments = Arguments {
        format: None,
        protocol: Protocol::File,
        machine: None,
        beside: false,
        vellum: None,
        real: BTreeSet::new(),
        source: None,
        image_options: None,
        time_limit: TIME_LIMIT,
        tests: Vec::new(),
    };
    while let Some(argument) = parser.next()? {
        match argument {
            Arg::Long("vellum") => arguments.vellum = Some(parser.value()?.into()),
            Arg::Long("format") => {
                let name = parser.value()?.string()?;
                if !FORMATS.contains(&name.as_str()) {
                    bail!("--format takes {}, not '{name}'", FORMATS.join(", "));
                }
                arguments.format = Some(name);
            }
            Arg::Long("protocol") => arguments.protocol = parser.value()?.parse()?,
            Arg::Long("machine") => arguments.machine = Some(parser.value()?.into()),
            Arg::Long("beside") => arguments.beside = true,
            Arg::Long("source") => arguments.source = Some(parser.value()?.into()),
            Arg::Long("real") => {
                for name in parser.value()?.string()?.split(',') {
                    arguments.real.insert(name.parse()?);
                }
            }
            Arg::Long("seconds") => {
                arguments.time_limit = Duration::from_secs(parser.value()?.parse()?);
            }
            Arg::Short('o') => arguments.image_options = Some(parser.value()?.string()?),
            Arg::Value(name) => arguments.tests.push(name.string()?),
            _ => return Err(argument.unexpected().into()),
        }
    }
    Ok(arguments)
}

/// Everything that the tests of one run have in common.
struct Campaign<'a> {
    suite: &'a Suite,
    tools: &'a Tools,
    /// QEMU's own programs, to compare with.
    real: Option<&'a Tools>,
    work: &'a Path,
    /// Where the logs of failed tests go.
    results: PathBuf,
    leftovers: Leftovers,
    format: &'a str,
    protocol: Protocol,
    list_file: String,
    image_options: Option<&'a str>,
    time_limit: Duration,
}

#[derive(Default)]
struct Tally {
    passed: u32,
    failed: u32,
    failed_as_listed: u32,
    skipped: u32,
    stale: Vec<String>,
}

impl Campaign<'_> {
    fn play(&self, list: &List, tests: &[String]) -> Result<()> {
        let mut tally = Tally::default();
        for name in tests {
            let outcome = match self.real {
                Some(real) => beside::run(self, real, name)?,
                None => supervised::run(self, name)?,
            };
            println!("{}", line(name, &outcome));
            tally.add(name, &outcome, list.expectation(name));
        }
        tally.report(&self.results, &self.list_file)
    }
}

fn line(name: &str, outcome: &Outcome) -> String {
    let seconds = outcome.took.as_secs_f64();
    let verdict = outcome.verdict.to_string();
    let line = format!("{name:32} {verdict:8} {seconds:6.1} s  {}", outcome.why);
    line.trim_end().to_owned()
}

impl Tally {
    fn add(&mut self, name: &str, outcome: &Outcome, expected: Option<&Expectation>) {
        let fails_as_listed = matches!(expected, Some(Expectation::Fails(_)));
        match outcome.verdict {
            Verdict::Passed => {
                self.passed += 1;
                if fails_as_listed {
                    self.stale.push(name.to_owned());
                }
            }
            Verdict::Failed if fails_as_listed => self.failed_as_listed += 1,
            Verdict::Failed => self.failed += 1,
            Verdict::Skipped => self.skipped += 1,
        }
    }

    fn report(&self, results: &Path, list_file: &str) -> Result<()> {
        if self.failed + self.failed_as_listed > 0 {
            println!("differences: {}", results.display());
        }
        println!(
            "{} passed, {} failed ({} more as {list_file} says), {} skipped",
            self.passed, self.failed, self.failed_as_listed, self.skipped
        );
        if !self.stale.is_empty() {
            bail!("{list_file} says that these fail: {}", self.stale.join(" "));
        }
        if self.failed > 0 {
            bail!("some tests failed");
        }
        Ok(())
    }
}

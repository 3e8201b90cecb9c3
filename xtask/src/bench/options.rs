//! The command line of the task.

use std::path::PathBuf;

use anyhow::Result;
use lexopt::{Arg, ValueExt as _};

use crate::workspace;

pub const USAGE: &str = "\
usage: cargo xtask bench vhost|fuse|nbd [--quick] [--seconds N] [--rounds N] [--only WORD]...
                         [--format FORMAT]... [--json FILE] [--vellum PROGRAM]
                         [--before PROGRAM | --transports]
       cargo xtask bench convert [--quick] [--rounds N] [--only WORD]... [--vellum PROGRAM]
       cargo xtask bench beside [--quick] [--seconds N] [--rounds N] [--only WORD]...
                         [--vellum PROGRAM]
       cargo xtask bench full [--quick] [--rounds N] [--only WORD]... [--vellum PROGRAM]
                         [--before PROGRAM]
       cargo xtask bench metrics [--seconds N] [--rounds N] [--only WORD]... [--vellum PROGRAM]
       cargo xtask bench many [--disks N] [--only WORD]... [--vellum PROGRAM]
       cargo xtask bench fair [--disks N] [--seconds N] [--rounds N] [--only WORD]...
                         [--vellum PROGRAM] [--before PROGRAM]";

const MIB: u64 = 1 << 20;

/// What is measured, and how long.
#[derive(Debug)]
pub struct Options {
    /// A look at few rows, in less than a minute.
    pub is_quick: bool,
    pub disk_bytes: u64,
    /// How many of them a daemon has, where it is about many.
    pub disks: usize,
    pub vellum: Option<PathBuf>,
    /// Another program of ours, between ours and QEMU's.
    pub before: Option<PathBuf>,
    /// Of FUSE: ours over `/dev/fuse` in the place of another program of ours.
    pub transports: bool,
    /// Of one measurement.
    pub seconds: f64,
    pub rounds: usize,
    /// Words of the titles of rows, of which each must be there.
    pub only: Vec<String>,
    /// Formats of the images that are served.
    pub formats: Vec<String>,
    /// Where everything that was measured is written.
    pub json: Option<PathBuf>,
}

impl Options {
    /// Reads what stands behind the kind of export.
    pub fn parse(mut arguments: lexopt::Parser) -> Result<Self> {
        let mut options = Options {
            is_quick: false,
            disk_bytes: 1024 * MIB,
            disks: 200,
            vellum: None,
            before: None,
            transports: false,
            seconds: 0.0,
            rounds: 0,
            only: Vec::new(),
            formats: Vec::new(),
            json: None,
        };
        while let Some(argument) = arguments.next()? {
            match argument {
                Arg::Long("quick") => options.is_quick = true,
                Arg::Long("transports") => options.transports = true,
                Arg::Long("disks") => options.disks = arguments.value()?.parse()?,
                Arg::Long("seconds") => options.seconds = arguments.value()?.parse()?,
                Arg::Long("rounds") => options.rounds = arguments.value()?.parse()?,
                Arg::Long("only") => options.only.push(arguments.value()?.string()?),
                Arg::Long("format") => options.formats.push(arguments.value()?.string()?),
                Arg::Long("json") => options.json = Some(arguments.value()?.into()),
                Arg::Long("vellum") => {
                    options.vellum = Some(workspace::existing(arguments.value()?.into())?)
                }
                Arg::Long("before") => {
                    options.before = Some(workspace::existing(arguments.value()?.into())?)
                }
                other => return Err(other.unexpected().into()),
            }
        }
        options.fill();
        Ok(options)
    }

    /// Whether the title of a row has all words that were asked for.
    pub fn wants(&self, title: &str) -> bool {
        self.only.iter().all(|word| title.contains(word.as_str()))
    }

    /// What was not said.
    fn fill(&mut self) {
        let (seconds, rounds) = if self.is_quick { (0.25, 1) } else { (0.6, 2) };
        if self.is_quick {
            self.disk_bytes = 256 * MIB;
        }
        if self.seconds == 0.0 {
            self.seconds = seconds;
        }
        if self.rounds == 0 {
            self.rounds = rounds;
        }
        if self.formats.is_empty() {
            self.formats = ["raw", "qcow2"].map(str::to_owned).into();
        }
    }
}

//! The chores of this repository: `cargo xtask TASK`. Each module is one task, but for `process`,
//! `workspace`, `checksum`, `fixed_length`, `guest`, `monitor` and `random`, which tasks use.

mod api;
mod apt_mirror;
mod bench;
mod checksum;
mod deb;
mod demo;
mod differential;
mod fixed_length;
mod fuzz;
mod golden;
mod guest;
mod interleavings;
mod iotests;
mod kills;
mod lost_writeback;
mod package;
mod process;
mod random;
mod setup;
mod space;
mod test;
mod tidy;
mod torture;
mod workspace;

use std::process::ExitCode;

use anyhow::{Result, bail};
use lexopt::Arg;

const USAGE: &str = "\
usage: cargo xtask TASK [ARGUMENTS]

  setup                      install the programs that the demo and the tests use
  demo [--vellum PROGRAM]    a real disk from end to end, with real clients, measured
  deb [--vellum PROGRAM] [--check ROOT]
                             a Debian package in the place of qemu-utils; --check tries it
                             in the system below ROOT
  bench vhost|fuse|nbd [--quick] [--seconds N] [--rounds N] [--only WORD]... [--json FILE]
                             [--format FORMAT]... [--vellum PROGRAM] [--before PROGRAM]
                             an export of ours beside QEMU's
  bench convert [--quick] [--rounds N] [--only WORD]... [--vellum PROGRAM]
                             other formats, from and to, beside qemu-img
  bench beside [--quick] [--seconds N] [--rounds N] [--only WORD]... [--vellum PROGRAM]
                             a disk with one request at a time beside one with hundreds
  bench full [--quick] [--rounds N] [--only WORD]... [--vellum PROGRAM] [--before PROGRAM]
                             writes to an image in a place without room for more
  bench metrics [--seconds N] [--rounds N] [--only WORD]... [--vellum PROGRAM]
                             what a client keeps of its speed while metrics are scraped
  bench many [--disks N] [--only WORD]... [--vellum PROGRAM]
                             many disks that nobody uses, in one daemon and in a daemon each
  bench fair [--disks N] [--seconds N] [--rounds N] [--only WORD]... [--vellum PROGRAM]
                             many disks under load beside a job with a limit: how even they
                             fare, and whether the limit is kept
  differential [--format FORMAT | --fixed-length [--loop] [--both-qemu]] [--seeds A..B] [--jobs N]
                             [--vellum PROGRAM] [--keep-going] [--no-shrink]
                             random scenarios against QEMU's programs; --fixed-length: images in
                             places as long as `measure` says
  test                       every test; ends with 'N passed, N failed'
  api [--check]              list the public items of the libraries in docs/api; --check
                             fails if a list there is out of date
  package [--no-build]       package what is published, and build a program with the packages
  tidy                       layers, licences, duplicates, file sizes
  fuzz [--seconds N] [--keep | --replay] [TARGET...]
                             run the fuzz targets; --keep adds what reaches new code
                             to their corpora
  iotests [--format NAME | --protocol file|fuse | --machine PROGRAM [--beside]] [--real img,io,nbd,qsd] [--vellum PROGRAM] [TEST...]
                             QEMU's own tests with our programs in the place of QEMU's
  interleavings [--times N] [--seed S] [TEST]
                             what lanes share, with every thread's turns decided by a seed
  torture --minutes N | --rounds N [--seed S] [--jobs N] [--fixed-length [--loop]]
                             [--vellum PROGRAM | --real]
                             servers killed in the middle of everything; --real tortures QEMU's
  kills [--times N] [--moves N] [--seed S] [--queues N] [--raw] [--vellum PROGRAM]
                             a real guest on vhost-user-blk whose daemon is killed N times
  lost-writeback [--rounds N] [--seed S] [--only WORD]... [--vellum PROGRAM]
                             all that is written, on a file system that loses writes at writeback
  space [--only WORD]... [--loop] [--mib N] [--vellum PROGRAM | --real]
                             a real guest fills, trims and refills images with no more room than
                             they need; --real: QEMU's daemon serves them
  golden                     make tests/golden anew with the real qemu-img
";

fn main() -> ExitCode {
    match run_task(lexopt::Parser::from_env()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_task(mut arguments: lexopt::Parser) -> Result<()> {
    let task = match arguments.next()? {
        Some(Arg::Value(task)) => task,
        Some(Arg::Long("help") | Arg::Short('h')) | None => {
            print!("{USAGE}");
            return Ok(());
        }
        Some(other) => return Err(other.unexpected().into()),
    };
    match task.to_string_lossy().as_ref() {
        "api" => api::run(arguments),
        "bench" => bench::run(arguments),
        "package" => package::run(arguments),
        "setup" => setup::run(arguments),
        "deb" => deb::run(arguments),
        "demo" => demo::run(arguments),
        "differential" => differential::run(arguments),
        "test" => test::run(arguments),
        "tidy" => tidy::run(arguments),
        "fuzz" => fuzz::run(arguments),
        "iotests" => iotests::run(arguments),
        "interleavings" => interleavings::run(arguments),
        "torture" => torture::run(arguments),
        "kills" => kills::run(arguments),
        "lost-writeback" => lost_writeback::run(arguments),
        "space" => space::run(arguments),
        "golden" => golden::run(arguments),
        other => bail!("no task is named '{other}'\n{USAGE}"),
    }
}

/// Refuses arguments, for tasks that take none.
fn no_arguments(arguments: &mut lexopt::Parser) -> Result<()> {
    match arguments.next()? {
        None => Ok(()),
        Some(argument) => Err(argument.unexpected().into()),
    }
}

//! `cargo xtask bench vhost`: our vhost-user-blk server beside QEMU's, in one run.
//!
//! The client is libblkio's: a driver of virtio-blk that others wrote, one thread for each queue.
//! Every row is measured once a round with each server, which is started for it alone; the order
//! changes from round to round. Of a row the medians are told: requests a second, and the server's
//! processor time for each. Nothing else should run meanwhile.

mod client;
mod report;
mod server;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lexopt::{Arg, ValueExt as _};

use crate::process;
use crate::random::Random;
use crate::setup;
use crate::workspace::Workspace;
use client::Load;
use report::Row;
use server::{Program, Server};

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 1024 * MIB;
/// A folder in memory, where the machine has one.
const MEMORY_FOLDER: &str = "/dev/shm";

/// The task.
pub fn run(mut arguments: lexopt::Parser) -> Result<()> {
    match arguments.next()? {
        Some(Arg::Value(kind)) if kind == "vhost" => {}
        _ => bail!("usage: cargo xtask bench vhost [--seconds N] [--rounds N] [--only WORD]..."),
    }
    let options = Options::parse(arguments)?;
    setup::ensure()?;
    let workspace = Workspace::locate()?;
    let vellum = match &options.vellum {
        Some(path) => path.clone(),
        None => workspace.build_vellum()?,
    };
    let mut programs = vec![Program::Vellum(vellum)];
    programs.extend(options.before.clone().map(Program::Vellum));
    programs.push(Program::Qemu);
    let on_disk = tempfile::tempdir_in(&workspace.target)?;
    let in_memory = tempfile::tempdir_in(MEMORY_FOLDER)?;
    let places = [
        Place::new("tmpfs", in_memory.path(), false)?,
        Place::new("disk", on_disk.path(), true)?,
    ];
    let mut rows = rows(&places, &options);
    for round in 0..options.rounds {
        for row in &mut rows {
            let mut order: Vec<usize> = (0..programs.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for program in order {
                let measured = measure(row, &programs[program], &options)
                    .with_context(|| format!("{}, {:?}", row.title(), programs[program]))?;
                row.add(program, measured);
            }
            eprintln!("round {}: {}", round + 1, row.line());
        }
    }
    println!("{}", report::table(&rows, &programs));
    Ok(())
}

struct Options {
    vellum: Option<PathBuf>,
    /// Another program of ours, between the two.
    before: Option<PathBuf>,
    seconds: f64,
    rounds: usize,
    /// Words of the titles of rows, of which each must be there.
    only: Vec<String>,
}

impl Options {
    fn parse(mut arguments: lexopt::Parser) -> Result<Self> {
        let mut options = Options {
            vellum: None,
            before: None,
            seconds: 2.0,
            rounds: 3,
            only: Vec::new(),
        };
        while let Some(argument) = arguments.next()? {
            match argument {
                Arg::Long("seconds") => options.seconds = arguments.value()?.parse()?,
                Arg::Long("rounds") => options.rounds = arguments.value()?.parse()?,
                Arg::Long("only") => options.only.push(arguments.value()?.string()?),
                Arg::Long("vellum") => options.vellum = Some(program(arguments.value()?.into())?),
                Arg::Long("before") => options.before = Some(program(arguments.value()?.into())?),
                other => return Err(other.unexpected().into()),
            }
        }
        Ok(options)
    }
}

fn program(path: PathBuf) -> Result<PathBuf> {
    let found = path.canonicalize();
    found.with_context(|| path.display().to_string())
}

/// Where images lie.
#[derive(Debug, Clone)]
pub struct Place {
    name: &'static str,
    folder: PathBuf,
    /// Around the page cache.
    direct: bool,
}

impl Place {
    /// Makes the images there: all of both is written.
    fn new(name: &'static str, folder: &Path, direct: bool) -> Result<Self> {
        let raw = folder.join("raw");
        let mut random = Random::new(1);
        let mut bytes = vec![0; MIB as usize];
        let mut file = std::fs::File::create(&raw)?;
        for _ in 0..DISK_BYTES / MIB {
            for word in bytes.chunks_exact_mut(4) {
                word.copy_from_slice(&(random.below(1 << 32) as u32).to_le_bytes());
            }
            std::io::Write::write_all(&mut file, &bytes)?;
        }
        file.sync_all()?;
        let mut convert = process::program("qemu-img")?;
        convert.args(["convert", "-f", "raw", "-O", "qcow2"]);
        process::output(convert.arg(&raw).arg(folder.join("qcow2")))?;
        std::fs::File::open(folder.join("qcow2"))?.sync_all()?;
        Ok(Place {
            name,
            folder: folder.to_owned(),
            direct,
        })
    }
}

/// All rows whose titles have the words that are wanted.
fn rows(places: &[Place], options: &Options) -> Vec<Row> {
    let mut rows = Vec::new();
    for place in places {
        for format in ["raw", "qcow2"] {
            for writes in [false, true] {
                for (queues, depth) in [(1, 1), (1, 32), (4, 32)] {
                    let load = Load {
                        queues,
                        depth,
                        writes,
                        duration: Duration::from_secs_f64(options.seconds),
                        disk_bytes: DISK_BYTES,
                    };
                    rows.push(Row::new(place.clone(), format, load));
                }
            }
        }
    }
    let has_all = |row: &Row| {
        let title = row.title();
        options
            .only
            .iter()
            .all(|word| title.contains(word.as_str()))
    };
    rows.retain(has_all);
    rows
}

/// What one row came to with one program.
fn measure(row: &Row, program: &Program, options: &Options) -> Result<report::Measured> {
    let folder = tempfile::tempdir()?;
    let server = Server::start(program, row, folder.path())?;
    let client = client::Client::connect(&server.socket(), &row.load)?;
    let warm = Duration::from_secs_f64(options.seconds / 8.0);
    let mut cpu = Vec::new();
    let requests = client.run(warm, || cpu.push(server.cpu_seconds()))?;
    let used: Vec<f64> = cpu.into_iter().collect::<Result<_>>()?;
    let [before, after] = used[..] else {
        bail!("the client measured nothing");
    };
    if let Err(failure) = server.stop() {
        // QEMU's crashes now and then when it ends; what it did before counts.
        ensure!(matches!(program, Program::Qemu), "{failure:#}");
        eprintln!("note: {failure:#}");
    }
    Ok(report::Measured {
        per_second: requests as f64 / row.load.duration.as_secs_f64(),
        cpu_us: (after - before) * 1e6 / requests as f64,
    })
}

//! `cargo xtask bench vhost|fuse|nbd`: an export of ours beside QEMU's, in one run.
//!
//! The clients are others': libblkio's driver of virtio-blk, with a thread for each queue, and
//! fio, on the file or through libnbd. Every row is measured once a round with each server, which
//! is started for it alone; the order changes from round to round. Of a row the medians are told:
//! requests a second, and the server's processor time for each. QEMU's servers have the settings
//! that are fastest: an I/O thread that polls where they can have one, and both of their ways to
//! do I/O. Nothing else should run meanwhile.
//! The other kinds (`beside`, `convert`, `fair`, `full`, `many`, `metrics`) are modules of their own.

mod beside;
mod blkio;
mod convert;
mod fair;
mod fio;
mod full;
mod load;
mod made;
mod many;
mod metrics;
mod options;
mod report;
mod server;

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lexopt::Arg;

use crate::setup;
use crate::workspace::Workspace;
use load::{Load, Place};
use options::Options;
use report::{Measured, Row};
use server::{Aio, Program, Server};

/// A folder in memory, where the machine has one.
const MEMORY_FOLDER: &str = "/dev/shm";

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Export {
    Vhost,
    Fuse,
    Nbd,
}

impl Export {
    fn name(self) -> &'static str {
        match self {
            Export::Vhost => "vhost",
            Export::Fuse => "fuse",
            Export::Nbd => "nbd",
        }
    }

    /// What there is several of.
    fn clients(self) -> &'static str {
        match self {
            Export::Vhost => "queues",
            Export::Fuse => "readers",
            Export::Nbd => "connections",
        }
    }

    /// How many clients with how many requests each read, and write.
    fn loads(self, is_quick: bool) -> [&'static [(usize, usize)]; 2] {
        const FEW: &[(usize, usize)] = &[(1, 1), (1, 32), (4, 32)];
        match self {
            _ if is_quick => [FEW, &[(1, 32)]],
            Export::Vhost => [FEW, FEW],
            Export::Fuse => {
                let reads = &[(1, 1), (2, 1), (4, 1), (1, 8), (1, 32), (1, 128), (4, 32)];
                [reads, FEW]
            }
            Export::Nbd => {
                let reads = &[
                    (1, 1),
                    (1, 2),
                    (1, 8),
                    (1, 32),
                    (1, 128),
                    (4, 1),
                    (4, 8),
                    (4, 32),
                    (4, 128),
                ];
                [reads, FEW]
            }
        }
    }

    /// QEMU's servers, with both of their ways to do I/O.
    fn rivals(self) -> Vec<Program> {
        let daemons = [Aio::IoUring, Aio::Native].map(Program::StorageDaemon);
        let servers = [Aio::IoUring, Aio::Native].map(Program::Nbd);
        match self {
            Export::Vhost | Export::Fuse => daemons.into(),
            Export::Nbd => daemons.into_iter().chain(servers).collect(),
        }
    }
}

/// The task.
pub fn run(mut arguments: lexopt::Parser) -> Result<()> {
    let kind = match arguments.next()? {
        Some(Arg::Value(kind)) => kind,
        _ => bail!("{}", options::USAGE),
    };
    let export = match kind.to_str() {
        Some("convert") => return convert::run(&Options::parse(arguments)?),
        Some("fair") => return fair::run(&Options::parse(arguments)?),
        Some("full") => return full::run(&Options::parse(arguments)?),
        Some("many") => return many::run(&Options::parse(arguments)?),
        Some("metrics") => return metrics::run(&Options::parse(arguments)?),
        Some("beside") => return beside::run(&Options::parse(arguments)?),
        Some("vhost") => Export::Vhost,
        Some("fuse") => Export::Fuse,
        Some("nbd") => Export::Nbd,
        _ => bail!("{}", options::USAGE),
    };
    let options = Options::parse(arguments)?;
    setup::ensure()?;
    let workspace = Workspace::locate()?;
    let programs = programs(export, &options, &workspace)?;
    let on_disk = tempfile::tempdir_in(&workspace.target)?;
    let in_memory = tempfile::tempdir_in(MEMORY_FOLDER)?;
    let places = [
        Place::new(
            "tmpfs",
            in_memory.path(),
            false,
            &options.formats,
            options.disk_bytes,
        )?,
        Place::new(
            "disk",
            on_disk.path(),
            true,
            &options.formats,
            options.disk_bytes,
        )?,
    ];
    let mut rows = rows(export, &places, &options, programs.len());
    for round in 0..options.rounds {
        for row in &mut rows {
            measure_all(row, export, &programs, round)?;
            eprintln!("round {}: {}", round + 1, row.line());
        }
    }
    println!("{}", report::table(&rows, &programs, export.clients()));
    if let Some(path) = &options.json {
        let told = format!("{:#}\n", report::json(&rows, &programs));
        std::fs::write(path, told).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn programs(export: Export, options: &Options, workspace: &Workspace) -> Result<Vec<Program>> {
    let path = workspace.vellum_or(options.vellum.as_deref())?;
    let ours = |name, path, more| Program::Vellum {
        name,
        path,
        more,
        words: &[],
    };
    let mut programs = vec![ours("vellum", path.clone(), "")];
    if let Some(path) = options.before.clone() {
        programs.push(ours("before", path, ""));
    } else if options.transports && export == Export::Fuse {
        programs.push(ours("/dev/fuse", path, ",io-uring=off"));
    }
    programs.extend(export.rivals());
    Ok(programs)
}

/// All rows whose titles have the words that are wanted.
fn rows(export: Export, places: &[Place], options: &Options, programs: usize) -> Vec<Row> {
    let mut rows = Vec::new();
    let [reads, writes] = export.loads(options.is_quick);
    let loads = reads.iter().map(|load| (load, false));
    let loads: Vec<_> = loads
        .chain(writes.iter().map(|load| (load, true)))
        .collect();
    for place in places {
        for format in &options.formats {
            for &(&(clients, depth), writes) in &loads {
                let load = Load {
                    clients,
                    depth,
                    writes,
                    duration: Duration::from_secs_f64(options.seconds),
                    disk_bytes: options.disk_bytes,
                };
                rows.push(Row::new(place.clone(), format, load, programs));
            }
        }
    }
    rows.retain(|row| options.wants(&row.title()));
    rows
}

/// One round of a row.
fn measure_all(row: &mut Row, export: Export, programs: &[Program], round: usize) -> Result<()> {
    let suits = |index: &usize| programs[*index].suits(&row.place);
    let mut order: Vec<usize> = (0..programs.len()).filter(suits).collect();
    if round % 2 == 1 {
        order.reverse();
    }
    for index in order {
        let measured = measure(row, export, &programs[index])
            .with_context(|| format!("{}, {}", row.title(), programs[index]))?;
        row.add(index, measured);
    }
    Ok(())
}

/// What one row came to with one program.
fn measure(row: &Row, export: Export, program: &Program) -> Result<Measured> {
    let folder = tempfile::tempdir()?;
    let server = Server::start(program, export, &[row], folder.path())?;
    let measured = measure_disk(row, export, &server, 0)?;
    end(server, program)?;
    Ok(measured)
}

/// What a row came to, whose image is one of the server's disks.
fn measure_disk(row: &Row, export: Export, server: &Server, disk: usize) -> Result<Measured> {
    if export == Export::Vhost {
        return measure_queues(row, server, disk);
    }
    let before = server.cpu_seconds()?;
    let counted = match export {
        Export::Nbd => {
            let name = server::name_of(disk);
            fio::load_nbd(&server.socket(export, disk), &name, &row.load)?
        }
        _ => fio::load_file(&server.file(disk), &row.load)?,
    };
    let used = server.cpu_seconds()? - before;
    Ok(Measured {
        per_second: counted.requests as f64 / counted.seconds,
        cpu_us: used * 1e6 / counted.requests as f64,
    })
}

fn end(server: Server, program: &Program) -> Result<()> {
    if let Err(failure) = server.stop() {
        // QEMU's crashes now and then when it ends; what it did before counts.
        ensure!(program.is_qemu(), "{failure:#}");
        eprintln!("note: {failure:#}");
    }
    Ok(())
}

fn measure_queues(row: &Row, server: &Server, disk: usize) -> Result<Measured> {
    let socket = server.socket(Export::Vhost, disk);
    let client = blkio::Client::connect(&socket, &row.load)?;
    let warm = row.load.duration / 8;
    let mut cpu = Vec::new();
    let requests = client.run(warm, || cpu.push(server.cpu_seconds()))?;
    let used: Vec<f64> = cpu.into_iter().collect::<Result<_>>()?;
    let [before, after] = used[..] else {
        bail!("the client measured nothing");
    };
    Ok(Measured {
        per_second: requests as f64 / row.load.duration.as_secs_f64(),
        cpu_us: (after - before) * 1e6 / requests as f64,
    })
}

//! `cargo xtask bench beside`: a disk with one request at a time beside a disk of the same daemon
//! that somebody reads with hundreds at once.
//!
//! Each is measured alone, then both at once. Of a round are told what of its own speed each keeps,
//! and what of an equal share of the machine the first one gets: that is half of what it has alone.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, anyhow};

use super::load::{Load, Place};
use super::options::Options;
use super::report::{Row, median};
use super::server::{Aio, Program, Server};
use super::{Export, MEMORY_FOLDER, end, measure_disk};
use crate::setup;
use crate::workspace::Workspace;

const FORMAT: &str = "qcow2";
const SHALLOW: usize = 1;
const DEEP: usize = 256;
/// So long before and after the shallow client the deep one runs, while both do.
const AROUND: Duration = Duration::from_millis(500);

/// Requests a second of both disks, alone and together.
struct Speeds {
    shallow_alone: f64,
    deep_alone: f64,
    shallow: f64,
    deep: f64,
}

/// The task.
pub fn run(options: &Options) -> Result<()> {
    setup::ensure()?;
    let workspace = Workspace::locate()?;
    let programs = [
        Program::Vellum {
            name: "vellum",
            path: workspace.vellum_or(options.vellum.as_deref())?,
            more: "",
            words: &[],
        },
        Program::StorageDaemon(Aio::IoUring),
    ];
    println!(
        "| depth {SHALLOW} beside {DEEP} | alone, requests/s | together | keeps | of an equal share | \
         the other keeps |"
    );
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    for (name, parent, is_direct) in [
        ("tmpfs", Path::new(MEMORY_FOLDER), false),
        ("disk", workspace.target.as_path(), true),
    ] {
        let folders = [tempfile::tempdir_in(parent)?, tempfile::tempdir_in(parent)?];
        let place = |folder: &Path| {
            let formats = [FORMAT.to_owned()];
            Place::new(name, folder, is_direct, &formats, options.disk_bytes)
        };
        let places = [place(folders[0].path())?, place(folders[1].path())?];
        for export in [Export::Nbd, Export::Vhost, Export::Fuse] {
            for program in &programs {
                let title = format!("{name}, {}, {program}", export.name());
                if options.wants(&title) {
                    println!(
                        "| {title} | {} |",
                        measure(program, export, &places, options)?
                    );
                }
            }
        }
    }
    Ok(())
}

/// All rounds of one server: the medians, as cells of the table.
fn measure(
    program: &Program,
    export: Export,
    places: &[Place; 2],
    options: &Options,
) -> Result<String> {
    let mut rounds = Vec::new();
    for _ in 0..options.rounds {
        rounds.push(round(program, export, places, options)?);
    }
    let of = |value: fn(&Speeds) -> f64| median(rounds.iter().map(value).collect());
    let keeps = of(|speeds| speeds.shallow / speeds.shallow_alone);
    Ok(format!(
        "{:.0} | {:.0} | {keeps:.2} | {:.2} | {:.2}",
        of(|speeds| speeds.shallow_alone),
        of(|speeds| speeds.shallow),
        2.0 * keeps,
        of(|speeds| speeds.deep / speeds.deep_alone),
    ))
}

fn round(
    program: &Program,
    export: Export,
    places: &[Place; 2],
    options: &Options,
) -> Result<Speeds> {
    let duration = Duration::from_secs_f64(options.seconds);
    let row = |place: &Place, depth, duration| {
        let load = Load {
            clients: 1,
            depth,
            writes: false,
            duration,
            disk_bytes: options.disk_bytes,
        };
        Row::new(place.clone(), FORMAT, load, 1)
    };
    let shallow = row(&places[0], SHALLOW, duration);
    let deep = row(&places[1], DEEP, duration);
    let around = row(&places[1], DEEP, duration + 2 * AROUND);
    let folder = tempfile::tempdir()?;
    let server = Server::start(program, export, &[&shallow, &deep], folder.path())?;
    let shallow_alone = measure_disk(&shallow, export, &server, 0)?.per_second;
    let deep_alone = measure_disk(&deep, export, &server, 1)?.per_second;
    let (first, other) = std::thread::scope(|scope| {
        let other = scope.spawn(|| measure_disk(&around, export, &server, 1));
        std::thread::sleep(AROUND);
        let first = measure_disk(&shallow, export, &server, 0);
        (first, other.join())
    });
    let other = other.map_err(|_| anyhow!("a client has panicked"))?;
    let speeds = Speeds {
        shallow_alone,
        deep_alone,
        shallow: first?.per_second,
        deep: other?.per_second,
    };
    end(server, program)?;
    Ok(speeds)
}

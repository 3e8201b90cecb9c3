//! `cargo xtask bench full`: writes to an image that is 99 % full, beside QEMU's.
//!
//! The image lies in a place of fixed length (a raw NBD export in memory) that is as long as
//! `measure` calls fully allocated, and 99 % of its clusters are allocated. A client discards random
//! clusters and writes them again, so that all that is written has to go where something was freed a
//! moment ago. Each round starts each server anew, on the same image. Nothing else should run
//! meanwhile.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use vellum_testing::nbd::{self, Connection};

use super::MEMORY_FOLDER;
use super::options::Options;
use super::report::median;
use crate::fixed_length::{Kind, Place, fully_allocated_bytes};
use crate::process::{self, Daemon};
use crate::random::Random;
use crate::setup;
use crate::workspace::Workspace;

const START_LIMIT: Duration = Duration::from_secs(30);
const CLUSTER_BYTES: u64 = 64 << 10;
/// Of all clusters, in percent.
const ALLOCATED: u64 = 99;
/// The image as every round finds it, and the file behind the place.
const FILLED: &str = "filled";
const PLACE: &str = "place";
const SOURCE: &str = "source";
/// So many clusters are discarded and written for each flush, where there are flushes.
const FLUSH_EVERY: u64 = 32;

/// What is measured.
struct Row {
    depth: usize,
    flushes: bool,
    /// Of each program, in the order of the rounds.
    measured: Vec<Vec<Measured>>,
}

#[derive(Debug, Clone, Copy)]
struct Measured {
    seconds: f64,
    cpu_seconds: f64,
    refused: u64,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, cpu_seconds) = (self.seconds, self.cpu_seconds);
        write!(
            f,
            "{seconds:.2} s, {cpu_seconds:.2} s of CPU, {} refused",
            self.refused
        )
    }
}

/// A server.
struct Program {
    name: &'static str,
    /// `None` for `qemu-nbd`.
    vellum: Option<PathBuf>,
}

impl Row {
    fn title(&self) -> String {
        let flushes = if self.flushes { ", flushes" } else { "" };
        format!("discard and rewrite 64K, depth {}{flushes}", self.depth)
    }

    fn median(&self, program: usize, value: fn(&Measured) -> f64) -> f64 {
        median(self.measured[program].iter().map(value).collect())
    }
}

/// The task.
pub fn run(options: &Options) -> Result<()> {
    setup::ensure()?;
    let workspace = Workspace::locate()?;
    let ours = |name, path| Program {
        name,
        vellum: Some(path),
    };
    let mut programs = vec![ours(
        "vellum",
        workspace.vellum_or(options.vellum.as_deref())?,
    )];
    if let Some(path) = options.before.clone() {
        programs.push(ours("before", path));
    }
    programs.push(Program {
        name: "QEMU",
        vellum: None,
    });
    let folder = tempfile::tempdir_in(MEMORY_FOLDER)?;
    let clusters = options.disk_bytes / 4 / CLUSTER_BYTES;
    make_image(folder.path(), clusters)?;
    let mut rows = rows(programs.len());
    rows.retain(|row| options.wants(&row.title()));
    for round in 0..options.rounds {
        for row in &mut rows {
            let mut order: Vec<usize> = (0..programs.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let program = &programs[index];
                let measured = measure(row, program, folder.path(), clusters)
                    .with_context(|| format!("{}, {}", row.title(), program.name))?;
                let (title, name) = (row.title(), program.name);
                eprintln!("round {}: {title}, {name}: {measured}", round + 1);
                row.measured[index].push(measured);
            }
        }
    }
    print!("{}", table(&rows, &programs, clusters));
    Ok(())
}

fn rows(programs: usize) -> Vec<Row> {
    let row = |(depth, flushes)| Row {
        depth,
        flushes,
        measured: vec![Vec::new(); programs],
    };
    [(1, false), (16, false), (1, true), (16, true)]
        .map(row)
        .into()
}

/// The image, in a file as long as the place.
fn make_image(folder: &Path, clusters: u64) -> Result<()> {
    let disk_bytes = clusters * CLUSTER_BYTES;
    let mut source = std::fs::File::create(folder.join(SOURCE))?;
    let (mut random, mut bytes) = (Random::new(1), vec![0; CLUSTER_BYTES as usize]);
    for _ in 0..clusters * ALLOCATED / 100 {
        random.fill(&mut bytes);
        std::io::Write::write_all(&mut source, &bytes)?;
    }
    source.set_len(disk_bytes)?;
    let run = |words: &[&str]| {
        let mut command = process::program("qemu-img")?;
        process::output(command.args(words).current_dir(folder))
    };
    run(&["convert", "-f", "raw", "-O", "qcow2", SOURCE, FILLED])?;
    let len_bytes = fully_allocated_bytes(disk_bytes, "")?;
    let filled = std::fs::OpenOptions::new()
        .write(true)
        .open(folder.join(FILLED))?;
    filled.set_len(len_bytes)?;
    Ok(std::fs::remove_file(folder.join(SOURCE))?)
}

/// One round of a row with one program.
fn measure(row: &Row, program: &Program, folder: &Path, clusters: u64) -> Result<Measured> {
    std::fs::copy(folder.join(FILLED), folder.join(PLACE))?;
    let place = Place::open(Kind::Nbd, folder, PLACE)?;
    let mut command = match &program.vellum {
        None => process::program("qemu-nbd")?,
        Some(path) => {
            let mut command = Command::new(path);
            command.arg("nbd");
            command
        }
    };
    let socket = folder.join("socket");
    command
        .args(["-t", "-e", "0", "--discard=unmap", "-f", "qcow2", "-k"])
        .arg(&socket)
        .arg(place.address.name())
        .current_dir(folder);
    let mut server = Daemon::start(&mut command, &folder.join("log"))?;
    server.wait_for_socket(&socket.to_string_lossy(), START_LIMIT)?;
    let mut connection = Connection::open(&socket, false)?;
    let (cpu_before, begun) = (server.cpu_seconds()?, Instant::now());
    let refused = Client {
        connection: &mut connection,
        random: Random::new(2),
        in_flight: HashMap::new(),
        refused: 0,
        cookie: 0,
    }
    .run(row, clusters)?;
    let measured = Measured {
        seconds: begun.elapsed().as_secs_f64(),
        cpu_seconds: server.cpu_seconds()? - cpu_before,
        refused,
    };
    drop(connection);
    server.stop()?;
    place.close()?;
    Ok(measured)
}

/// What a request in flight does.
#[derive(Debug, Clone, Copy)]
enum Request {
    Discard(u64),
    Write(u64),
    Flush,
}

struct Client<'a> {
    connection: &'a mut Connection,
    random: Random,
    in_flight: HashMap<u64, Request>,
    refused: u64,
    cookie: u64,
}

impl Client<'_> {
    /// Discards and writes as many clusters as the disk has; how many requests were refused.
    fn run(mut self, row: &Row, clusters: u64) -> Result<u64> {
        let mut begun = 0;
        loop {
            while self.in_flight.len() < row.depth && begun < clusters {
                let cluster = self.random.below(clusters * ALLOCATED / 100);
                // Of two requests in flight none may be about the same cluster.
                let is_taken = |request: &Request| match request {
                    Request::Discard(other) | Request::Write(other) => *other == cluster,
                    Request::Flush => false,
                };
                if self.in_flight.values().any(is_taken) {
                    continue;
                }
                begun += 1;
                self.send(Request::Discard(cluster))?;
                if row.flushes && begun % FLUSH_EVERY == 0 {
                    self.send(Request::Flush)?;
                }
            }
            if self.in_flight.is_empty() {
                break;
            }
            self.receive()?;
        }
        self.send(Request::Flush)?;
        self.receive()?;
        Ok(self.refused)
    }

    fn send(&mut self, request: Request) -> Result<()> {
        self.cookie += 1;
        let payload = vec![self.cookie as u8; CLUSTER_BYTES as usize];
        let (command, cluster, payload) = match request {
            Request::Discard(cluster) => (nbd::Command::Trim, cluster, &[][..]),
            Request::Write(cluster) => (nbd::Command::Write, cluster, &payload[..]),
            Request::Flush => (nbd::Command::Flush, 0, &[][..]),
        };
        let place = match request {
            Request::Flush => (0, 0),
            _ => (cluster * CLUSTER_BYTES, CLUSTER_BYTES as u32),
        };
        self.in_flight.insert(self.cookie, request);
        self.connection
            .send(command, 0, self.cookie, place, payload)
    }

    fn receive(&mut self) -> Result<()> {
        let answer = self.connection.receive(|_| None)?;
        let request = self.in_flight.remove(&answer.cookie);
        match request.context("an answer to nothing")? {
            Request::Discard(cluster) if answer.error == 0 => self.send(Request::Write(cluster)),
            Request::Write(_) => {
                self.refused += u64::from(answer.error != 0);
                Ok(())
            }
            request => {
                ensure!(
                    answer.error == 0,
                    "{request:?} fails with error {}",
                    answer.error
                );
                Ok(())
            }
        }
    }
}

/// Medians; the first program beside the others.
fn table(rows: &[Row], programs: &[Program], clusters: u64) -> String {
    let mut head = format!("| {clusters} clusters, {ALLOCATED} % allocated |");
    let mut rule = String::from("| --- |");
    for program in programs {
        let _ = write!(head, " {}, s | CPU s | refused |", program.name);
        rule.push_str(" ---: | ---: | ---: |");
    }
    for other in &programs[1..] {
        let _ = write!(
            head,
            " speed of {}'s | CPU of {}'s |",
            other.name, other.name
        );
        rule.push_str(" ---: | ---: |");
    }
    let mut text = format!("{head}\n{rule}\n");
    for row in rows {
        let _ = write!(text, "| {} |", row.title());
        let time = |program| row.median(program, |one| one.seconds);
        let cpu = |program| row.median(program, |one| one.cpu_seconds);
        for index in 0..programs.len() {
            let refused = row.measured[index].iter().map(|one| one.refused).max();
            let refused = refused.unwrap_or(0);
            let _ = write!(
                text,
                " {:.2} | {:.2} | {refused} |",
                time(index),
                cpu(index)
            );
        }
        for other in 1..programs.len() {
            let (speed, cpu) = (time(other) / time(0), cpu(0) / cpu(other));
            let _ = write!(text, " {speed:.2} | {cpu:.2} |");
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_program_stands_beside_the_others() {
        let one = |seconds, cpu_seconds| Measured {
            seconds,
            cpu_seconds,
            refused: 0,
        };
        let mut rows = rows(2);
        rows.truncate(1);
        rows[0].measured = vec![vec![one(1.0, 0.5)], vec![one(2.0, 0.25)]];
        let program = |name| Program { name, vellum: None };
        let text = table(&rows, &[program("vellum"), program("QEMU")], 100);
        let last = "| discard and rewrite 64K, depth 1 | 1.00 | 0.50 | 0 | 2.00 | 0.25 | 0 | 2.00 | 2.00 |";
        assert_eq!(text.lines().last(), Some(last));
    }
}

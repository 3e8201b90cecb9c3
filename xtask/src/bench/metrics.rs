//! `cargo xtask bench metrics`: what metrics cost.
//!
//! A disk is read by a client while the daemon has `--metrics` and somebody scrapes it each second, and
//! while it has none, in turn. Of each round both are told by the medians, and what the first keeps of the
//! second by that of all rounds, with the lowest and the highest.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use super::load::{Load, Place};
use super::options::Options;
use super::report::{Row, median};
use super::server::{Program, Server};
use super::{Export, MEMORY_FOLDER, end, measure_disk};
use crate::setup;
use crate::workspace::Workspace;

const FORMAT: &str = "qcow2";
/// Where the metrics are, in the server's folder.
const SOCKET: &str = "http";
/// How often they are read.
const INTERVAL: Duration = Duration::from_secs(1);
/// One of the metrics of any daemon.
const ONE: &str = "vellum_disks ";

/// Requests in a second and processor time for each, with metrics and without.
struct Pair {
    with: (f64, f64),
    without: (f64, f64),
}

/// The task.
pub fn run(options: &Options) -> Result<()> {
    setup::ensure()?;
    let workspace = Workspace::locate()?;
    let path = workspace.vellum_or(options.vellum.as_deref())?;
    let program = |name, words| Program::Vellum {
        name,
        path: path.clone(),
        more: "",
        words,
    };
    let with = program("metrics", &["--metrics", "unix:http"]);
    let without = program("no metrics", &[]);
    println!(
        "| 4K reads | requests/s with metrics | without | share | lowest | highest | processor, µs a request, with | \
         without |"
    );
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    for (name, parent, is_direct) in [
        ("tmpfs", Path::new(MEMORY_FOLDER), false),
        ("disk", workspace.target.as_path(), true),
    ] {
        let folder = tempfile::tempdir_in(parent)?;
        let formats = [FORMAT.to_owned()];
        let place = Place::new(name, folder.path(), is_direct, &formats, options.disk_bytes)?;
        for export in [Export::Vhost, Export::Nbd] {
            for depth in [1, 32] {
                let title = format!("{name}, {}, depth {depth}", export.name());
                if !options.wants(&title) {
                    continue;
                }
                let load = Load {
                    clients: 1,
                    depth,
                    writes: false,
                    duration: Duration::from_secs_f64(options.seconds),
                    disk_bytes: options.disk_bytes,
                };
                let row = Row::new(place.clone(), FORMAT, load, 1);
                let mut pairs = Vec::new();
                for round in 0..options.rounds {
                    pairs.push(pair(&row, export, [&with, &without], round)?);
                }
                println!("| {title} | {} |", shown(&pairs));
            }
        }
    }
    Ok(())
}

/// The medians of all rounds, as cells of the table.
fn shown(pairs: &[Pair]) -> String {
    let of = |value: fn(&Pair) -> f64| median(pairs.iter().map(value).collect());
    let mut shares: Vec<f64> = pairs.iter().map(|it| it.with.0 / it.without.0).collect();
    shares.sort_by(f64::total_cmp);
    let (lowest, highest) = (shares[0], shares[shares.len() - 1]);
    format!(
        "{:.0} | {:.0} | {:.3} | {lowest:.3} | {highest:.3} | {:.2} | {:.2}",
        of(|pair| pair.with.0),
        of(|pair| pair.without.0),
        median(shares),
        of(|pair| pair.with.1),
        of(|pair| pair.without.1),
    )
}

fn pair(row: &Row, export: Export, programs: [&Program; 2], round: usize) -> Result<Pair> {
    let [with, without] = programs;
    // What comes first changes, so that a machine that becomes slower favours none.
    let (with, without) = if round.is_multiple_of(2) {
        let with = measure(row, export, with, true)?;
        (with, measure(row, export, without, false)?)
    } else {
        let without = measure(row, export, without, false)?;
        (measure(row, export, with, true)?, without)
    };
    Ok(Pair { with, without })
}

fn measure(row: &Row, export: Export, program: &Program, scrapes: bool) -> Result<(f64, f64)> {
    let folder = tempfile::tempdir()?;
    let server = Server::start(program, export, &[row], folder.path())?;
    let is_over = AtomicBool::new(false);
    let (measured, scraped) = std::thread::scope(|scope| {
        let scraper = scrapes.then(|| scope.spawn(|| scrape_until(&is_over, folder.path())));
        let measured = measure_disk(row, export, &server, 0);
        is_over.store(true, Ordering::Release);
        let scraped = scraper.map(|scraper| {
            scraper.thread().unpark();
            scraper.join()
        });
        (measured, scraped)
    });
    if let Some(scraped) = scraped {
        let scrapes = scraped.map_err(|_| anyhow!("the scraper has panicked"))??;
        ensure!(scrapes > 0, "nothing was scraped");
    }
    end(server, program)?;
    let measured = measured?;
    Ok((measured.per_second, measured.cpu_us))
}

/// Reads the metrics each second; how often it did. It sleeps between, until it is woken at the end: what it
/// took of the processors would count as what metrics cost.
fn scrape_until(is_over: &AtomicBool, folder: &Path) -> Result<u64> {
    let (mut scrapes, mut next) = (0, Instant::now());
    while !is_over.load(Ordering::Acquire) {
        if Instant::now() >= next {
            let told = get(&folder.join(SOCKET), "/metrics")?;
            ensure!(told.contains(ONE), "these are no metrics: {told}");
            scrapes += 1;
            next += INTERVAL;
        }
        std::thread::park_timeout(next.saturating_duration_since(Instant::now()));
    }
    Ok(scrapes)
}

/// What a daemon says to a request of HTTP.
pub fn get(socket: &Path, path: &str) -> Result<String> {
    let link = UnixStream::connect(socket);
    let mut link = link.with_context(|| socket.display().to_string())?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    link.write_all(request.as_bytes())?;
    let mut said = String::new();
    link.read_to_string(&mut said)?;
    ensure!(said.starts_with("HTTP/1.1 200 "), "{path}: {said}");
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_each_round() {
        let pair = |with: f64, without: f64| Pair {
            with: (with, 2.0),
            without: (without, 1.0),
        };
        // A machine that becomes slower changes nothing.
        let pairs = [pair(99.0, 100.0), pair(49.0, 50.0), pair(202.0, 200.0)];
        assert_eq!(
            shown(&pairs),
            "99 | 100 | 0.990 | 0.980 | 1.010 | 2.00 | 1.00"
        );
    }
}

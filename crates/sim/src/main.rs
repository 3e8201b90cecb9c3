//! Runs seeds on all cores: `vellum-sim --seeds 0..10000 --cuts 100 --threads 2`.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use vellum_sim::foreign::ForeignFormat;
use vellum_sim::shrink::shrink;
use vellum_sim::{Explorer, Failure, Found, Totals, daemon, engine};

const USAGE: &str = "usage: vellum-sim [--daemon | --checksums | --format NAME] [--space] [--seeds FROM..TO] [--cuts N] \
    [--threads N] [--keep-going]";

struct Options {
    /// Scenarios of the daemon, not of one image.
    daemon: bool,
    /// Only images with checksums.
    checksums: bool,
    /// Scenarios about space.
    space: bool,
    /// Images of another format.
    foreign: Option<ForeignFormat>,
    from: u64,
    to: u64,
    cuts: u64,
    threads: u64,
    keep_going: bool,
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Option<Options> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let mut options = Options {
        daemon: false,
        checksums: false,
        space: false,
        foreign: None,
        from: 0,
        to: 1000,
        cuts: 100,
        threads: cores,
        keep_going: false,
    };
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--seeds" => {
                let seeds = arguments.next()?;
                let (from, to) = seeds.split_once("..")?;
                (options.from, options.to) = (from.parse().ok()?, to.parse().ok()?);
            }
            "--daemon" => options.daemon = true,
            "--format" => options.foreign = Some(ForeignFormat::named(&arguments.next()?)?),
            "--space" => options.space = true,
            "--checksums" => options.checksums = true,
            "--cuts" => options.cuts = arguments.next()?.parse().ok()?,
            "--threads" => options.threads = arguments.next()?.parse().ok()?,
            "--keep-going" => options.keep_going = true,
            _ => return None,
        }
    }
    Some(options)
}

#[derive(Default)]
struct Progress {
    next: AtomicU64,
    cuts: AtomicU64,
    steps: AtomicU64,
    done: AtomicU64,
    stop: AtomicBool,
    /// What the daemon was in the middle of, and how often.
    cuts_during: Mutex<BTreeMap<String, u64>>,
    failed: Mutex<Vec<(u64, Wrong)>>,
}

impl Progress {
    fn note_moments(&self, played: daemon::Played) -> Totals {
        let mut all = lock(&self.cuts_during);
        for (name, cuts) in played.cuts_during {
            *all.entry(name).or_default() += cuts;
        }
        played.totals
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|lock| lock.into_inner())
}

/// What is wrong with a seed.
enum Wrong {
    /// A scenario, which can be made smaller.
    Image(Box<Found>),
    Daemon(Failure),
}

impl Wrong {
    fn failure(&self) -> &Failure {
        match self {
            Wrong::Image(found) => &found.failure,
            Wrong::Daemon(failure) => failure,
        }
    }
}

fn explorer(options: &Options) -> Explorer {
    let explorer = match options.foreign {
        Some(format) => Explorer::foreign(format),
        None => Explorer::new(engine()),
    };
    Explorer {
        always_checksums: options.checksums,
        space: options.space,
        ..explorer
    }
}

fn work(options: &Options, progress: &Progress) {
    let explorer = explorer(options);
    let settings = daemon::Settings {
        fixed_images: options.space,
        ..daemon::Settings::default()
    };
    while !progress.stop.load(Ordering::Relaxed) {
        let seed = progress.next.fetch_add(1, Ordering::Relaxed);
        if seed >= options.to {
            return;
        }
        let played = match options.daemon {
            false => explorer.seed(seed, options.cuts).map_err(Wrong::Image),
            true => daemon::seed(seed, options.cuts, &settings)
                .map(|played| progress.note_moments(played))
                .map_err(Wrong::Daemon),
        };
        match played {
            Ok(totals) => {
                progress.cuts.fetch_add(totals.cuts, Ordering::Relaxed);
                progress.steps.fetch_add(totals.steps, Ordering::Relaxed);
            }
            Err(wrong) => {
                eprintln!("seed {seed}: {}", wrong.failure());
                progress
                    .stop
                    .fetch_or(!options.keep_going, Ordering::Relaxed);
                lock(&progress.failed).push((seed, wrong));
            }
        }
        progress.done.fetch_add(1, Ordering::Relaxed);
    }
}

fn report(options: &Options, progress: &Progress, start: Instant) {
    let seconds = start.elapsed().as_secs_f64();
    let cuts = progress.cuts.load(Ordering::Relaxed);
    println!(
        "{} of {} seeds, {cuts} cuts, {} disk requests, {seconds:.0} s, {:.0} cuts/s",
        progress.done.load(Ordering::Relaxed),
        options.to - options.from,
        progress.steps.load(Ordering::Relaxed),
        cuts as f64 / seconds,
    );
}

fn main() -> ExitCode {
    let Some(options) = parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    // A panic of the engine is a finding that is told below, once.
    std::panic::set_hook(Box::new(|_| {}));
    let start = Instant::now();
    let progress = Progress::default();
    progress.next.store(options.from, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..options.threads)
            .map(|_| scope.spawn(|| work(&options, &progress)))
            .collect();
        let mut told = Instant::now();
        while workers.iter().any(|worker| !worker.is_finished()) {
            std::thread::sleep(Duration::from_millis(50));
            if told.elapsed() > Duration::from_secs(10) {
                report(&options, &progress, start);
                told = Instant::now();
            }
        }
    });
    report(&options, &progress, start);
    for (name, cuts) in &*lock(&progress.cuts_during) {
        println!("{cuts:9} cuts during {name}");
    }
    let mut failed = progress
        .failed
        .into_inner()
        .unwrap_or_else(|lock| lock.into_inner());
    failed.sort_by_key(|(seed, _)| *seed);
    println!("{} failures", failed.len());
    let Some((seed, wrong)) = failed.into_iter().next() else {
        return ExitCode::SUCCESS;
    };
    let found = match wrong {
        Wrong::Image(found) => *found,
        Wrong::Daemon(failure) => {
            let cuts = options.cuts;
            println!(
                "{failure}\nagain: --daemon{} --seeds {seed}..{} --cuts {cuts}",
                if options.space { " --space" } else { "" },
                seed + 1
            );
            return ExitCode::FAILURE;
        }
    };
    println!("shrinking seed {seed}: {}", found.failure);
    let small = shrink(&explorer(&options), found, Duration::from_secs(60));
    let name = format!("seed_{seed}");
    println!(
        "{}",
        small.scenario.to_test(&name, &small.failure.to_string())
    );
    ExitCode::FAILURE
}

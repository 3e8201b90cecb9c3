//! What tests share.
#![allow(dead_code)]

use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use std::thread;

use vellum::qcow2::Backing;
use vellum::qcow2::check::{CheckOptions, CheckReport, Finding, FindingKind, check};
use vellum::{Raw, RawOptions, Storage};
use vellum_io::executor::Executor;
use vellum_io::lane::{self, Backend, LaneOptions};
use vellum_storage::file::{Create, Locks};
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};
use vellum_storage::{FileOptions, FileStorage, MemStorage};

/// Runs a QEMU tool in `dir`.
pub fn qemu(tool: &str, dir: &Path, args: &[&str]) -> Output {
    match Command::new(tool).args(args).current_dir(dir).output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            panic!("{tool} is missing: `cargo xtask setup` installs it")
        }
        result => result.unwrap_or_else(|error| panic!("{tool}: {error}")),
    }
}

/// Runs a QEMU tool that must succeed, and returns what it prints.
pub fn qemu_ok(tool: &str, dir: &Path, args: &[&str]) -> String {
    let output = qemu(tool, dir, args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{tool} {args:?}: {stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Opens a file; `Create` says whether it may be made.
pub fn open(path: &Path, create: Create) -> Arc<dyn Storage> {
    let options = FileOptions::default()
        .create(create)
        // Tests look at images with QEMU's tools while they have them open.
        .locks(Locks::Unlocked);
    FileStorage::open(path, &options).expect("the test's own file")
}

/// What a check says: exit code, counts and messages in the order of the alphabet.
#[derive(Debug, PartialEq, Eq)]
pub struct Verdict {
    pub exit_code: i32,
    pub report: Option<CheckReport>,
    pub messages: Vec<String>,
}

/// The verdict of `qemu-img check`.
pub fn qemu_verdict(path: &Path) -> Verdict {
    let name = path.to_str().expect("a plain name");
    let dir = path.parent().expect("a file in a directory");
    let output = qemu(
        "qemu-img",
        dir,
        &["check", "-f", "qcow2", "--output=json", name],
    );
    let json = String::from_utf8_lossy(&output.stdout);
    let number = |key: &str| number_in(&json, key);
    let report = (!json.trim().is_empty()).then(|| CheckReport {
        corruptions: number("corruptions"),
        leaks: number("leaks"),
        check_errors: number("check-errors"),
        image_end_offset: number("image-end-offset"),
        total_clusters: number("total-clusters"),
        allocated_clusters: number("allocated-clusters"),
        fragmented_clusters: number("fragmented-clusters"),
        compressed_clusters: number("compressed-clusters"),
        corruptions_fixed: number("corruptions-fixed"),
        leaks_fixed: number("leaks-fixed"),
    });
    let stderr = String::from_utf8_lossy(&output.stderr);
    let messages = stderr.lines().filter_map(finding_in).collect();
    Verdict {
        exit_code: output.status.code().unwrap_or(-1),
        report,
        messages,
    }
    .sorted()
}

/// The finding in a line of QEMU's; a warning without an end may come before it.
fn finding_in(line: &str) -> Option<String> {
    let starts = ["ERROR", "Leaked", "Can't get", "Use qemu-img"];
    let at = starts.iter().filter_map(|start| line.find(start)).min()?;
    Some(line[at..].to_owned())
}

/// The number of a key in JSON that holds each key once; 0 if it is not there.
fn number_in(json: &str, key: &str) -> u64 {
    let Some((_, rest)) = json.split_once(&format!("\"{key}\": ")) else {
        return 0;
    };
    let end = rest
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(rest.len());
    rest[..end].parse().expect("a number")
}

/// The verdict of [`check`].
pub fn vellum_verdict(path: &Path) -> Verdict {
    let found: Arc<Mutex<Vec<String>>> = Arc::default();
    let sink = found.clone();
    let on_finding = move |finding: &Finding| {
        // QEMU has as many of these as it has caches.
        if finding.kind == FindingKind::Note {
            return;
        }
        sink.lock()
            .unwrap()
            .extend(finding.message.lines().map(str::to_owned));
    };
    let options = CheckOptions::default().on_finding(Some(Arc::new(on_finding)));
    let storage = open(path, Create::No);
    let result = lane::block_on(check(storage, &options));
    let messages = std::mem::take(&mut *found.lock().unwrap());
    let exit_code = match &result {
        Err(_) => 1,
        Ok(report) if report.check_errors > 0 => 1,
        Ok(report) if report.corruptions > 0 => 2,
        Ok(report) if report.leaks > 0 => 3,
        Ok(_) => 0,
    };
    Verdict {
        exit_code,
        report: result.ok(),
        messages,
    }
    .sorted()
}

impl Verdict {
    fn sorted(mut self) -> Self {
        self.messages.sort();
        self
    }
}

/// Random numbers by a seed, which is printed: whoever looks at a failed test sees it.
#[derive(Debug, Clone)]
pub struct Random(fastrand::Rng);

impl Random {
    pub fn new(seed: u64) -> Random {
        println!("seed {seed}");
        Random(fastrand::Rng::with_seed(seed))
    }

    pub fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0.u64(..end)
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.0.usize(..of.len())]
    }
}

/// Runs a future whose requests all end at once, as those on memory do.
pub fn run_on_memory<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    let executor = Executor::new(|| {});
    let (sender, receiver) = std::sync::mpsc::channel();
    drop(executor.spawn(async move { sender.send(future.await).unwrap() }));
    executor.run_ready();
    receiver.try_recv().expect("requests on memory never wait")
}

/// Runs `work` on the lane of a new thread.
pub fn on_lane<T: Send + 'static>(
    backend: Backend,
    work: impl FnOnce() -> T + Send + 'static,
) -> thread::JoinHandle<T> {
    thread::spawn(move || {
        lane::install(&LaneOptions {
            backend,
            ..LaneOptions::default()
        })
        .unwrap();
        let result = work();
        lane::finish();
        result
    })
}

/// What a backing file holds, if there is to be one: up to twice as much as an image of
/// `size_bytes`, with sectors that differ from their neighbours.
pub fn random_backing(random: &mut Random, size_bytes: u64) -> Option<Vec<u8>> {
    (random.below(2) == 0).then(|| {
        let len_bytes = (random.below(2 * size_bytes / 512) + 1) * 512;
        (0..len_bytes)
            .map(|at| (at / 512 % 251) as u8 + 1)
            .collect()
    })
}

/// A backing file that holds `bytes`, or none.
pub fn backing(bytes: Option<&[u8]>) -> Backing {
    bytes.map_or(Backing::None, |bytes| {
        let storage = Arc::new(MemStorage::with_bytes(bytes.to_vec()));
        Backing::Given(Raw::open(storage, RawOptions::default()).unwrap())
    })
}

/// Has requests to come fail for want of room, once or from then on.
pub fn fill_disk(file: &FaultStorage, random: &mut Random) {
    const ENOSPC: i32 = 28;
    let operation = match random.below(6) {
        0 => Operation::WriteZeroes,
        1 => Operation::Truncate,
        _ => Operation::Write,
    };
    let times = match random.below(2) {
        0 => Times::Once,
        _ => Times::Always,
    };
    let pass = random.below(20) as usize;
    file.fail(Matching::operation(operation), pass, times, ENOSPC);
}

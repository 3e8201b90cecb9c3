//! Copies that the power ends, and that are gone on with: whatever the moment, and however
//! often, the target ends as if nothing had happened.
//!
//! What says how far a copy is (the journal of `convert --journal`, the note of `receive`) is a number
//! that is there as soon as it is told, or, after one cut in four, the one before it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, Fix, check, repair};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{OpenOptions, Qcow2};
use vellum::raw::{Raw, RawOptions};
use vellum::{BlockDevice, Buffer};
use vellum_format::stream::{Header, Record, StreamId, Writer, payload_hash};
use vellum_jobs::copy::{CopyOptions, Silent};
use vellum_jobs::resume::copy_in_pieces;
use vellum_jobs::transfer::{Input, ReceiveOptions, receive};
use vellum_sim::cut::PowerCut;
use vellum_sim::disk::{Disk, Mode};
use vellum_sim::disk_bugs::DiskBug;
use vellum_sim::record::CutPoint;
use vellum_sim::rng::Rng;
use vellum_sim::runtime::Runtime;
use vellum_sim::sparse_bytes::SparseBytes;
use vellum_sim::storage::SimFileOptions;
use vellum_storage::Storage;

const PIECE_BYTES: u64 = 2 << 20;
const SIZE_BYTES: u64 = 2 * PIECE_BYTES + (512 << 10) + 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    Raw,
    Qcow2 { cluster_bits: u32, compress: bool },
}

/// What makes the copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    /// `convert --journal`
    Pieces,
    /// `receive` of a whole disk.
    Stream,
    /// `receive` of what has changed: all of it.
    Changes,
}

/// A disk with data here and there, some of it zeroes, more around the ends of pieces.
fn source(rng: &mut Rng) -> SparseBytes {
    let mut pages = SparseBytes::new();
    for number in 0..24 {
        let at = match number {
            0 => PIECE_BYTES - 20_000,
            1 => 2 * PIECE_BYTES - 100_000,
            2 => SIZE_BYTES - 9000,
            _ => rng.below(SIZE_BYTES / 512) * 512,
        };
        let len = (rng.between(1, 200) * 512).min(SIZE_BYTES - at);
        let value = rng.below(4) as u8 * 7;
        let bytes: Vec<u8> = (0..len)
            .map(|i| value.wrapping_mul((i / 512) as u8 | 1))
            .collect();
        pages.write(at, &bytes);
    }
    pages.set_len(SIZE_BYTES);
    pages
}

fn device(pages: &SparseBytes) -> Arc<dyn BlockDevice> {
    let storage =
        Disk::new(Mode::Instant).add_file("source", pages.clone(), SimFileOptions::default());
    let options = RawOptions::default().read_only(true);
    Raw::open(storage, options).expect("a raw device")
}

async fn open(target: Target, storage: Arc<dyn Storage>) -> Arc<dyn BlockDevice> {
    match target {
        Target::Raw => Raw::open(storage, RawOptions::default()).expect("a raw device"),
        Target::Qcow2 { .. } => {
            let options = OpenOptions::default().discard(true);
            let image = Qcow2::open(storage, Arc::new(DenyAll), options).await;
            image.expect("the target opens")
        }
    }
}

/// A new target, durable.
fn new_target(target: Target) -> SparseBytes {
    let disk = Disk::new(Mode::Instant);
    let storage = disk.add_file("target", SparseBytes::new(), SimFileOptions::default());
    let mut runtime = Runtime::new(disk.clone(), 0);
    let made = runtime.block_on(async move {
        match target {
            Target::Raw => storage.truncate(SIZE_BYTES).await,
            Target::Qcow2 { cluster_bits, .. } => {
                let options = CreateOptions::default()
                    .size_bytes(SIZE_BYTES)
                    .cluster_size_bytes(1 << cluster_bits);
                create(storage, None, &options).await
            }
        }
    });
    made.expect("nobody waits").expect("the target is made");
    disk.contents(0)
}

/// A machine after a cut: what is in the target, and what the journal said, one entry
/// after the other.
struct Machine {
    target: SparseBytes,
    journal: Vec<u64>,
}

/// Goes on with a copy, in an order of `seed`; calls `at_step` before each step.
fn go_on(
    machine: &Machine,
    (how, kind): (How, Target),
    source: &SparseBytes,
    seed: u64,
    bug: Option<DiskBug>,
    at_step: &mut dyn FnMut(CutPoint, &[u64]),
) -> Result<SparseBytes, String> {
    let disk = Disk::new(Mode::Scheduled);
    disk.set_bug(bug);
    let storage = disk.add_file("target", machine.target.clone(), SimFileOptions::default());
    let journal = Rc::new(RefCell::new(machine.journal.clone()));
    let (told, source) = (journal.clone(), device(source));
    let job = async move {
        let start_bytes = *told.borrow().last().expect("it has begun");
        if kind != Target::Raw {
            let repaired = repair(storage.clone(), Fix::Leaks, &CheckOptions::default()).await;
            let report = repaired.map_err(|error| format!("repair: {error}"))?;
            if report.corruptions + report.check_errors > 0 {
                return Err(format!("the target is damaged: {report:?}"));
            }
        }
        let target = open(kind, storage.clone()).await;
        let done = |bytes| {
            told.borrow_mut().push(bytes);
            Ok::<(), String>(())
        };
        match how {
            How::Pieces => copy_pieces(kind, source, &target, start_bytes, done).await?,
            How::Stream | How::Changes => {
                let options = ReceiveOptions {
                    parallel: 4,
                    target_is_zero: how == How::Stream,
                };
                let (header, mut records) = stream(how, &source, start_bytes).await;
                let received = receive(&header, &mut records, &target, &options, done, |_| ());
                received
                    .await
                    .map_err(|error| format!("receive: {error:?}"))?;
            }
        }
        target
            .close()
            .await
            .map_err(|error| format!("close: {error}"))
    };
    let mut runtime = Runtime::new(disk.clone(), seed);
    let mut step = |_, disk: &Disk| {
        at_step(disk.cut_point(), &journal.borrow());
        true
    };
    let done = runtime
        .run_observed(job, &mut step)
        .map_err(|_| "it waits for ever")?;
    done.expect("nobody stopped it")?;
    runtime.finish_all();
    Ok(disk.contents(0))
}

async fn copy_pieces(
    kind: Target,
    source: Arc<dyn BlockDevice>,
    target: &Arc<dyn BlockDevice>,
    start_bytes: u64,
    done: impl FnMut(u64) -> Result<(), String>,
) -> Result<(), String> {
    let options = CopyOptions {
        target_is_zero: true,
        start_bytes,
        len_bytes: Some(SIZE_BYTES),
        compressed_clusters_bytes: match kind {
            Target::Qcow2 {
                cluster_bits,
                compress: true,
            } => Some(1 << cluster_bits),
            _ => None,
        },
        ..CopyOptions::default()
    };
    let copied = copy_in_pieces(&[source], target, &options, PIECE_BYTES, &mut Silent, done).await;
    copied.map_err(|error| format!("copy: {error:?}"))
}

/// The records of a stream of the source, from a place on, with many checkpoints.
async fn stream(how: How, source: &Arc<dyn BlockDevice>, start_bytes: u64) -> (Header, Records) {
    const RECORD_BYTES: u64 = 40 << 10;
    let header = Header {
        id: StreamId([1; 16]),
        size_bytes: SIZE_BYTES,
        incremental: how == How::Changes,
        granularity_bytes: 512,
        base: None,
        start_bytes,
        source: [0; 32],
        bitmap: Vec::new(),
    };
    let mut writer = Writer::new(&header).expect("a sound header");
    let mut bytes = Vec::new();
    let mut at = start_bytes;
    while at < SIZE_BYTES {
        let len_bytes = RECORD_BYTES.min(SIZE_BYTES - at);
        let read = source.read(at, Buffer::zeroed(len_bytes as usize)).await;
        let data = read.expect("the source is sound");
        let mut put = |record| bytes.extend(writer.head(&record).expect("a sound record"));
        if !data.is_zero() {
            put(Record::Data {
                offset_bytes: at,
                len_bytes: len_bytes as u32,
                payload_bytes: len_bytes as u32,
                hash: payload_hash(&data),
            });
            bytes.extend_from_slice(&data);
        } else if how == How::Changes {
            put(Record::Zeroes {
                offset_bytes: at,
                len_bytes,
            });
        }
        at += len_bytes;
        if (at / RECORD_BYTES).is_multiple_of(20) {
            let record = Record::Checkpoint { offset_bytes: at };
            bytes.extend(writer.head(&record).expect("a sound record"));
        }
    }
    let records = writer.records();
    let end = writer.head(&Record::End { records });
    bytes.extend(end.expect("a sound record"));
    (header, Records { bytes, at: 0 })
}

struct Records {
    bytes: Vec<u8>,
    at: usize,
}

impl Input for Records {
    type Error = ();

    async fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, ()> {
        let left = &self.bytes[self.at..];
        let len = buffer.len().min(left.len());
        buffer[..len].copy_from_slice(&left[..len]);
        self.at += len;
        Ok(len)
    }
}

/// The target must be whole, and hold what the source holds.
fn verify(target: SparseBytes, kind: Target, source: &SparseBytes) -> Result<(), String> {
    let disk = Disk::new(Mode::Instant);
    let storage = disk.add_file("target", target, SimFileOptions::default());
    let mut runtime = Runtime::new(disk, 0);
    let read = runtime.block_on(async move {
        if kind != Target::Raw {
            let report = check(storage.clone(), &CheckOptions::default()).await;
            let report = report.map_err(|error| format!("check: {error}"))?;
            if report.corruptions + report.check_errors + report.leaks > 0 {
                return Err(format!("the target is not sound: {report:?}"));
            }
        }
        let target = open(kind, storage).await;
        if target.size_bytes() != SIZE_BYTES {
            return Err(format!("{} bytes", target.size_bytes()));
        }
        let buffer = Buffer::zeroed(SIZE_BYTES as usize);
        target
            .read(0, buffer)
            .await
            .map_err(|error| format!("read: {error}"))
    });
    let read = read.map_err(|_| "a read waits for ever")??;
    let wanted = source.bytes(0, SIZE_BYTES);
    match read
        .iter()
        .zip(&wanted)
        .position(|(one, other)| one != other)
    {
        None => Ok(()),
        Some(at) => Err(format!("byte {at} differs")),
    }
}

/// Makes copies of some seeds whose power fails at many moments, and goes on with each.
fn interrupt((how, kind): (How, Target), bug: Option<&DiskBug>, seeds: u64) -> Result<u64, String> {
    let mut cuts = 0;
    for seed in 0..seeds {
        let mut rng = Rng::new(seed);
        let source = source(&mut rng);
        let fresh = Machine {
            target: new_target(kind),
            journal: vec![0],
        };
        let mut machines = vec![fresh];
        // The second time some of those that were interrupted are interrupted again.
        for moments in [8, 1] {
            let mut cut = Vec::new();
            for machine in &machines {
                let schedule = rng.next_u64();
                let mut points = Vec::new();
                let mut note = |point: CutPoint, journal: &[u64]| {
                    points.push((point, journal.to_vec()));
                };
                let ended = go_on(
                    machine,
                    (how, kind),
                    &source,
                    schedule,
                    bug.cloned(),
                    &mut note,
                )?;
                verify(ended, kind, &source).map_err(|why| format!("seed {seed}: {why}"))?;
                // One that was at its end has nothing to write.
                for _ in 0..if points.is_empty() { 0 } else { moments } {
                    let (point, mut journal) = rng.pick(&points).clone();
                    if journal.len() > 1 && rng.chance(1, 4) {
                        journal.pop();
                    }
                    let target = PowerCut::random(&point, &mut rng).apply(&point).remove(0);
                    cut.push(Machine { target, journal });
                }
            }
            cuts += cut.len() as u64;
            machines = cut;
        }
        for machine in &machines {
            let ended = go_on(
                machine,
                (how, kind),
                &source,
                rng.next_u64(),
                None,
                &mut |_, _| (),
            )?;
            verify(ended, kind, &source).map_err(|why| format!("seed {seed}: {why}"))?;
        }
    }
    Ok(cuts)
}

const QCOW2: Target = Target::Qcow2 {
    cluster_bits: 16,
    compress: false,
};

fn survives(kind: Target) {
    survives_by(How::Pieces, kind);
}

fn survives_by(how: How, kind: Target) {
    let cuts = interrupt((how, kind), None, 2).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
    assert!(cuts > 2 * 8, "some are interrupted twice");
}

#[test]
fn a_raw_target_ends_as_if_nothing_had_happened() {
    survives(Target::Raw);
}

#[test]
fn a_qcow2_target_ends_as_if_nothing_had_happened() {
    survives(QCOW2);
}

#[test]
fn a_target_of_small_clusters_ends_as_if_nothing_had_happened() {
    survives(Target::Qcow2 {
        cluster_bits: 12,
        compress: false,
    });
}

#[test]
fn a_compressed_target_ends_as_if_nothing_had_happened() {
    survives(Target::Qcow2 {
        cluster_bits: 16,
        compress: true,
    });
}

#[test]
fn what_is_received_ends_as_if_nothing_had_happened() {
    let small = Target::Qcow2 {
        cluster_bits: 12,
        compress: false,
    };
    for how in [How::Stream, How::Changes] {
        for kind in [Target::Raw, QCOW2, small] {
            survives_by(how, kind);
        }
    }
}

/// A journal that is ahead of what is durable is noticed.
#[test]
fn a_disk_that_does_not_flush_is_found_out() {
    let bug = DiskBug::no_flush(|_| true);
    for kind in [Target::Raw, QCOW2] {
        for how in [How::Pieces, How::Stream, How::Changes] {
            let found = interrupt((how, kind), Some(&bug), 8);
            assert!(found.is_err(), "{how:?} {kind:?}");
        }
    }
}

//! Every structure of an image, broken in every field, and repaired.
//!
//! A seed names an image, a place and what is written there. Whatever it is,
//! - nothing panics, and a check that finds nothing wrong is right: see below;
//! - a repair changes nothing that could be read before it;
//! - once a repair leaves nothing wrong, everything may be overwritten: what reads as
//!   it did before the damage does not change by that, and nothing is wrong afterwards;
//! - `qemu-img check` agrees about the image as it was, and after the repair.
//!
//! Where each field of each structure has each of some hostile values, what a check calls
//! clean is what QEMU opens.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::common::{Random, open, qemu, qemu_ok, qemu_verdict, run_on_memory, vellum_verdict};
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, CheckReport, Finding, Fix, check, repair};
use vellum::qcow2::{Backing, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, RequestFlags, Storage};
use vellum_io::{Buffers, lane};
use vellum_storage::file::Create;
use vellum_storage::{MemStorage, WriteFlags};

const SIZE: u64 = 8 << 20;
/// The guest's disk is read and compared in pieces of this size.
const PIECE: u64 = 64 << 10;

/// Images that QEMU makes: options, and steps on them.
const KINDS: [(&str, &[&str]); 4] = [
    (
        "cluster_size=64k",
        &[
            "qemu-io -c 'write -P 1 0 300k' -c 'write -z 1M 128k' -c 'write -P 2 2M 64k' image",
            "qemu-img snapshot -c one image",
            "qemu-io -c 'write -P 3 128k 1M' -c 'write -P 4 7M 1M' image",
            "qemu-img snapshot -c two image",
            "qemu-img bitmap --add image bits",
            "qemu-io -c 'write -P 5 0 64k' image",
        ],
    ),
    (
        "cluster_size=4k,extended_l2=off,refcount_bits=8",
        &[
            "qemu-io -c 'write -P 1 0 300k' -c 'write -c -P 2 1M 64k' -c 'write -P 6 3M 3k' image",
            "qemu-img snapshot -c one image",
            "qemu-io -c 'write -P 3 128k 1M' image",
        ],
    ),
    (
        "cluster_size=16k,extended_l2=on",
        &["qemu-io -c 'write -P 1 5k 300k' -c 'write -z 1M 130k' -c 'write -P 4 7M 1M' image"],
    ),
    (
        "compat=0.10,cluster_size=512",
        &["qemu-io -c 'write -P 1 5k 100k' -c 'write -P 4 7M 90k' image"],
    ),
];

/// A range of bytes that a structure takes.
struct Place {
    name: &'static str,
    at: u64,
    len: u64,
}

struct Image {
    bytes: Vec<u8>,
    places: Vec<Place>,
    /// What the guest reads.
    content: Vec<Option<Vec<u8>>>,
}

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

impl Image {
    fn make(dir: &Path, kind: &str, steps: &[&str]) -> Image {
        let size = SIZE.to_string();
        let create = ["create", "-q", "-f", "qcow2", "-o", kind, "image", &size];
        qemu_ok("qemu-img", dir, &create);
        for step in steps {
            qemu_ok("sh", dir, &["-c", step]);
        }
        let bytes = std::fs::read(dir.join("image")).expect("just made");
        let mut image = Image {
            bytes,
            places: Vec::new(),
            content: Vec::new(),
        };
        image.find_places();
        let bytes = image.bytes.clone();
        image.content = run_on_memory(async move { content(&in_memory(&bytes).await).await });
        image
    }

    fn be64(&self, at: u64) -> u64 {
        let at = at as usize;
        u64::from_be_bytes(self.bytes[at..at + 8].try_into().expect("eight bytes"))
    }

    fn be32(&self, at: u64) -> u64 {
        self.be64(at) >> 32
    }

    fn add(&mut self, name: &'static str, at: u64, len: u64) {
        let len = len.min(self.bytes.len() as u64 - at);
        self.places.push(Place { name, at, len });
    }

    fn find_places(&mut self) {
        let cluster = 1 << self.be32(20);
        self.add("header", 4, 108);
        self.add("extensions", 104, 256);
        let (l1, entries) = (self.be64(40), self.be32(36));
        self.add("L1 table", l1, entries * 8);
        let tables = (0..entries).map(|index| self.be64(l1 + index * 8) & OFFSET);
        for table in tables.filter(|&table| table != 0).collect::<Vec<_>>() {
            // Where the entries are that say anything.
            self.add("L2 table", table, cluster.min(512));
            self.add("L2 table", table, cluster);
        }
        let (table, clusters) = (self.be64(48), self.be32(56));
        self.add("refcount table", table, 32.min(clusters * cluster));
        let blocks = (0..4).map(|index| self.be64(table + index * 8) & OFFSET);
        for block in blocks.filter(|&block| block != 0).collect::<Vec<_>>() {
            self.add("refcount block", block, cluster.min(512));
        }
        if self.be32(60) > 0 {
            let snapshots = self.be64(64);
            self.add("snapshot table", snapshots, 160);
            let l1 = self.be64(snapshots);
            self.add("L1 table of a snapshot", l1, 16);
            let l2 = self.be64(l1) & OFFSET;
            self.add("L2 table of a snapshot", l2, 256);
        }
        if self.be32(4) >= 3 && self.be64(88) & 1 != 0 {
            let mut at = self.be32(100);
            while self.be32(at) != 0x2385_2875 {
                at += 8 + self.be32(at + 4).next_multiple_of(8);
            }
            let directory = self.be64(at + 8 + 16);
            self.add("bitmap directory", directory, 32);
            let table = self.be64(directory);
            self.add("bitmap table", table, 16);
        }
    }

    /// A damaged copy, and what was done to it: once, or twice.
    fn damaged(&self, random: &mut Random) -> (Vec<u8>, String) {
        let mut bytes = self.bytes.clone();
        let times = 1 + random.below(3) / 2;
        let done: Vec<String> = (0..times)
            .map(|_| self.damage(&mut bytes, random))
            .collect();
        (bytes, done.join(", "))
    }

    /// Breaks something, and says what.
    fn damage(&self, bytes: &mut [u8], random: &mut Random) -> String {
        if random.below(5) == 0 {
            return self.lead_beyond(bytes, random);
        }
        let place = &self.places[random.below(self.places.len() as u64) as usize];
        let width = random.pick(&[1, 2, 4, 8]).min(place.len);
        let at = place.at + random.below(place.len / width) * width;
        let field = &mut bytes[at as usize..(at + width) as usize];
        let what = random.below(6);
        match what {
            0 | 1 => field[random.below(width) as usize] ^= 1 << random.below(8),
            2 => field.fill(0),
            3 => field.fill(0xff),
            // Another entry of the same structure, or a place of another one.
            4 => {
                let from = self.places[random.below(self.places.len() as u64) as usize].at;
                let word = (from & !511 | (random.below(2) << 63)).to_be_bytes();
                field.copy_from_slice(&word[..width as usize]);
            }
            _ => field
                .iter_mut()
                .for_each(|byte| *byte = random.below(256) as u8),
        }
        let name = place.name;
        format!("{name}: {width} bytes at {at:#x}, damage {what}")
    }

    /// Has an entry of some table, or a word of any other structure, point behind the end
    /// of the file, where a repair may want to put something.
    fn lead_beyond(&self, bytes: &mut [u8], random: &mut Random) -> String {
        let tables = self.places.iter().filter(|place| {
            let name = place.name;
            name.contains("table") || name.contains("directory") || name.contains("block")
        });
        let tables: Vec<&Place> = tables.collect();
        let place = tables[random.below(tables.len() as u64) as usize];
        let at = (place.at + random.below(place.len / 8) * 8) as usize;
        let cluster = 1u64 << self.be32(20);
        let end = (bytes.len() as u64).next_multiple_of(cluster);
        let to = end + random.below(12) * cluster;
        let copied = random.below(2) << 63;
        bytes[at..at + 8].copy_from_slice(&(to | copied).to_be_bytes());
        format!("{}: the word at {at:#x} leads to {to:#x}", place.name)
    }

    /// Every word of the structures that decide whether an image can be opened, with each
    /// of some hostile values: where, the bytes, and what they are.
    fn hostile_words(&self) -> Vec<(u64, Vec<u8>, String)> {
        let decide = |place: &&Place| {
            let name = place.name;
            !name.starts_with("L2") && !name.contains("block")
        };
        let mut words = Vec::new();
        for place in self.places.iter().filter(decide) {
            for (at, width) in (0..place.len / 4)
                .map(|word| (place.at + word * 4, 4))
                .chain((0..place.len / 8).map(|word| (place.at + word * 8, 8)))
            {
                let old = &self.bytes[at as usize..(at + width) as usize];
                let number = old
                    .iter()
                    .fold(0u64, |number, &byte| number << 8 | u64::from(byte));
                let values = [
                    0,
                    1,
                    u64::MAX,
                    number + 1,
                    number ^ 4,
                    number ^ 1 << 24,
                    number.wrapping_mul(2),
                    number ^ 1 << (width * 8 - 1),
                    self.bytes.len() as u64,
                ];
                for value in values {
                    let bytes = value.to_be_bytes()[8 - width as usize..].to_vec();
                    let what = format!("{}: {bytes:02x?} at {at:#x}", place.name);
                    words.push((at, bytes, what));
                }
            }
        }
        words
    }
}

async fn in_memory(bytes: &[u8]) -> Arc<dyn Storage> {
    let storage: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let buffers = Buffers::from_iter([Buffer::copy_of(bytes)]);
    let written = storage.write(0, buffers, WriteFlags::default()).await;
    written.expect("memory takes all");
    storage
}

async fn image_in(storage: &Arc<dyn Storage>, read_only: bool) -> vellum::Result<Arc<Qcow2>> {
    let options = OpenOptions::default()
        .read_only(read_only)
        .backing(Backing::None);
    Qcow2::open(storage.clone(), Arc::new(DenyAll), options).await
}

/// What the guest reads, piece by piece; `None`: an error. An image that does not open
/// has no pieces.
async fn content(storage: &Arc<dyn Storage>) -> Vec<Option<Vec<u8>>> {
    let Ok(image) = image_in(storage, true).await else {
        return Vec::new();
    };
    let mut pieces = Vec::new();
    let size = image.size_bytes().min(SIZE);
    for at in (0..size).step_by(PIECE as usize) {
        let len = PIECE.min(size - at) as usize;
        let read = image.read(at, Buffer::for_read(len)).await;
        pieces.push(read.ok().map(|buffer| buffer.to_vec()));
    }
    pieces
}

/// Whether everything readable `before` is the same `after`.
fn keeps(before: &[Option<Vec<u8>>], after: &[Option<Vec<u8>>]) -> bool {
    before.iter().enumerate().all(|(at, piece)| match piece {
        None => true,
        Some(_) => after.get(at) == Some(piece),
    })
}

fn is_sound(report: &CheckReport) -> bool {
    report.corruptions + report.check_errors == 0
}

/// Overwrites some pieces of a sound image: the others must stay as they are, if they
/// are what they were before the damage. Others may show tables, which change.
async fn overwrite(storage: &Arc<dyn Storage>, image: &Image, random: &mut Random, what: &str) {
    let mut expected = content(storage).await;
    for (piece, whole) in expected.iter_mut().zip(&image.content) {
        if piece != whole {
            *piece = None;
        }
    }
    let Ok(image) = image_in(storage, false).await else {
        return;
    };
    for (number, piece) in expected.iter_mut().enumerate() {
        let Some(old) = piece else {
            continue;
        };
        if random.below(3) > 0 {
            continue;
        }
        let bytes = vec![0xa0 + (number % 16) as u8; old.len()];
        let at = number as u64 * PIECE;
        let write = image.write(at, Buffer::copy_of(&bytes), RequestFlags::default());
        if let Err(error) = write.await {
            panic!("{what}: a sound image does not take a write: {error}");
        }
        *piece = Some(bytes);
    }
    let closed = image.close().await;
    closed.unwrap_or_else(|error| panic!("{what}: {error}"));
    let after = content(storage).await;
    assert!(
        keeps(&expected, &after),
        "{what}: a write changed other data"
    );
    let wrong = errors_in(storage).await;
    let wrong = wrong.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(wrong.is_empty(), "{what}: wrong after writes: {wrong:?}");
}

/// What a check calls errors, but for flags that say too little: where the damage had
/// two entries share a cluster and one has left it, the other does not know that.
async fn errors_in(storage: &Arc<dyn Storage>) -> vellum::Result<Vec<String>> {
    let found: Arc<Mutex<Vec<String>>> = Arc::default();
    let sink = found.clone();
    let on_finding = move |finding: &Finding| {
        let message = &finding.message;
        let is_spared =
            message.starts_with("ERROR OFLAG_COPIED data cluster") && message.ends_with("=1");
        if message.starts_with("ERROR") && !is_spared {
            sink.lock().unwrap().push(message.clone());
        }
    };
    let options = CheckOptions::default().on_finding(Some(Arc::new(on_finding)));
    check(storage.clone(), &options).await?;
    let found = found.lock().unwrap();
    Ok(found.clone())
}

/// One seed; gives back the image as it was damaged, and repaired.
async fn play(image: &Image, seed: u64) -> (Vec<u8>, Option<Vec<u8>>, String) {
    let mut random = Random::new(seed);
    let (bytes, what) = image.damaged(&mut random);
    let what = format!("seed {seed}, {what}");
    let storage = in_memory(&bytes).await;
    let before = content(&storage).await;
    let options = CheckOptions::default();
    let found = check(storage.clone(), &options).await;
    if found.as_ref().is_ok_and(is_sound) {
        overwrite(&in_memory(&bytes).await, image, &mut random, &what).await;
    }
    if repair(storage.clone(), Fix::All, &options).await.is_err() {
        return (bytes, None, what);
    }
    let after = content(&storage).await;
    assert!(keeps(&before, &after), "{what}: the repair changed data");
    let left = check(storage.clone(), &options).await;
    let left = left.unwrap_or_else(|error| panic!("{what}: after the repair: {error}"));
    let len = storage.len_bytes().expect("memory") as usize;
    let read = storage.read(0, Buffers::from_iter([Buffer::for_read(len)]));
    let repaired = read.into_single().await.expect("memory").to_vec();
    if is_sound(&left) {
        assert_eq!(left.leaks, 0, "{what}: leaks are left");
        overwrite(&storage, image, &mut random, &what).await;
    }
    (bytes, Some(repaired), what)
}

fn images(dir: &Path) -> Vec<Image> {
    let make = |(kind, steps): (&str, &[&str])| Image::make(dir, kind, steps);
    KINDS.into_iter().map(make).collect()
}

fn repair_all(seeds: Range<u64>) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for image in images(dir.path()) {
        let image = Arc::new(image);
        for seed in seeds.clone() {
            let image = image.clone();
            run_on_memory(async move { drop(play(&image, seed).await) });
        }
    }
}

#[test]
fn a_repair_loses_nothing_whatever_is_broken() {
    repair_all(0..25);
}

#[test]
#[ignore = "takes minutes"]
fn a_repair_loses_nothing_in_a_thousand_cases() {
    repair_all(0..1000);
}

#[test]
fn qemu_agrees_about_the_damage_and_about_the_repair() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("broken");
    for image in images(dir.path()) {
        let image = Arc::new(image);
        for seed in 1000..1008 {
            let image = image.clone();
            let (broken, repaired, what) = run_on_memory(async move { play(&image, seed).await });
            std::fs::write(&path, &broken).expect("a writable directory");
            let (ours, theirs) = (vellum_verdict(&path), qemu_verdict(&path));
            assert_eq!(
                ours.exit_code, theirs.exit_code,
                "{what}: {ours:?} {theirs:?}"
            );
            let Some(repaired) = repaired else {
                continue;
            };
            std::fs::write(&path, &repaired).expect("a writable directory");
            let (ours, theirs) = (vellum_verdict(&path), qemu_verdict(&path));
            assert_eq!(ours, theirs, "{what}, repaired");
            let storage = open(&path, Create::No);
            assert!(lane::block_on(content(&storage)).len() <= 128);
        }
    }
}

/// So many images are opened by one process.
const OPENED_AT_ONCE: usize = 32;

/// Opens every image with a hostile word that a check calls clean, of every `every`.
fn open_what_is_clean(every: usize) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut wrong = Vec::new();
    for image in images(dir.path()) {
        let words = image.hostile_words().into_iter().step_by(every);
        let mut clean = words.filter_map(|(at, word, what)| {
            let mut bytes = image.bytes.clone();
            bytes[at as usize..at as usize + word.len()].copy_from_slice(&word);
            let copy = bytes.clone();
            let found = run_on_memory(async move {
                check(in_memory(&copy).await, &CheckOptions::default()).await
            });
            found
                .is_ok_and(|report| is_sound(&report))
                .then_some((bytes, what))
        });
        loop {
            let some: Vec<(Vec<u8>, String)> = clean.by_ref().take(OPENED_AT_ONCE).collect();
            if some.is_empty() {
                break;
            }
            wrong.extend(refused_by_qemu(dir.path(), &some));
        }
    }
    assert!(wrong.is_empty(), "called clean:\n{}", wrong.join("\n"));
}

/// Which of some images QEMU does not open, to read or to write, and why.
fn refused_by_qemu(dir: &Path, images: &[(Vec<u8>, String)]) -> Vec<String> {
    let mut words = Vec::new();
    for (number, (bytes, _)) in images.iter().enumerate() {
        std::fs::write(dir.join(format!("word{number}")), bytes).expect("a writable directory");
        for access in ["-r ", ""] {
            let open = format!("open {access}-o driver=qcow2 word{number}");
            words.extend(["-c".to_owned(), open, "-c".to_owned(), "close".to_owned()]);
        }
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let said = qemu("qemu-io", dir, &words).stderr;
    let said = String::from_utf8_lossy(&said).into_owned();
    let refused = said.lines().filter_map(|line| {
        let (_, refused) = line.split_once("can't open device word")?;
        let (number, why) = refused.split_once(':')?;
        let (_, what) = &images[number.parse::<usize>().ok()?];
        (!is_expected(why)).then(|| format!("{what}: {why}"))
    });
    refused.collect()
}

/// What `qemu-img check` calls clean as well, and QEMU does not open all the same.
fn is_expected(said: &str) -> bool {
    let expected = [
        // An image that is encrypted opens with its key.
        "Parameter 'encrypt.key-secret' is required",
        "qcow2: Image is corrupt; cannot be opened read/write",
    ];
    expected.iter().any(|why| said.contains(why))
}

#[test]
fn who_qemu_cannot_open_is_not_called_clean() {
    open_what_is_clean(7);
}

#[test]
#[ignore = "takes minutes"]
fn whatever_word_is_hostile_who_qemu_cannot_open_is_not_called_clean() {
    open_what_is_clean(1);
}

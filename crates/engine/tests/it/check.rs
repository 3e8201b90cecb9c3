//! Our check beside `qemu-img check`, on images that QEMU made and we damaged.

use std::path::{Path, PathBuf};

use crate::common::{Random, Verdict, open, qemu, qemu_ok, qemu_verdict, vellum_verdict};
use vellum::qcow2::check::{CheckOptions, Fix, repair};
use vellum_io::lane;
use vellum_storage::file::Create;

/// An image in memory, to be damaged.
struct Image {
    bytes: Vec<u8>,
}

impl Image {
    fn be64(&self, at: u64) -> u64 {
        let at = at as usize;
        u64::from_be_bytes(self.bytes[at..at + 8].try_into().expect("eight bytes"))
    }

    fn be32(&self, at: u64) -> u64 {
        self.be64(at) >> 32
    }

    fn put64(&mut self, at: u64, value: u64) {
        let at = at as usize;
        self.bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
    }

    fn put32(&mut self, at: u64, value: u32) {
        let at = at as usize;
        self.bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }

    fn change(&mut self, at: u64, change: impl FnOnce(u64) -> u64) {
        self.put64(at, change(self.be64(at)));
    }

    fn cluster_size(&self) -> u64 {
        1 << self.be32(20)
    }

    /// Where entry `index` of the active L1 table is.
    fn l1(&self, index: u64) -> u64 {
        self.be64(40) + index * 8
    }

    /// Where entry `index` of the first L2 table is, counted in units of 8 bytes.
    fn l2(&self, index: u64) -> u64 {
        (self.be64(self.l1(0)) & OFFSET) + index * 8
    }

    fn refcount_table(&self, index: u64) -> u64 {
        self.be64(48) + index * 8
    }

    /// Where the 16-bit refcount of a cluster is.
    fn refcount(&self, cluster: u64) -> u64 {
        self.be64(self.refcount_table(0)) + cluster * 2
    }

    fn set_refcount(&mut self, cluster: u64, value: u16) {
        let at = self.refcount(cluster) as usize;
        self.bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
    }

    fn snapshots(&self) -> u64 {
        self.be64(64)
    }

    /// Where the data of the header extension `kind` is.
    fn extension(&self, kind: u64) -> u64 {
        let mut at = self.be32(100);
        while self.be32(at) != kind {
            at += 8 + self.be32(at + 4).next_multiple_of(8);
        }
        at + 8
    }

    fn bitmap_directory(&self) -> u64 {
        self.be64(self.extension(0x2385_2875) + 16)
    }
}

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

/// A directory with one image of QEMU's in it.
struct Fixture {
    dir: tempfile::TempDir,
    pristine: Vec<u8>,
}

impl Fixture {
    /// Makes an image with `options` and runs the `steps` on it: `qemu-io` commands,
    /// or other programs where the first word names one.
    fn new(options: &str, steps: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path();
        qemu_ok(
            "qemu-img",
            path,
            &["create", "-q", "-f", "qcow2", "-o", options, "image", "8M"],
        );
        for step in steps {
            match step.split_once(' ') {
                Some(("qemu-img", args)) => {
                    let args: Vec<&str> = args.split(' ').collect();
                    qemu_ok("qemu-img", path, &args);
                }
                _ => {
                    qemu_ok("qemu-io", path, &["-f", "qcow2", "-c", step, "image"]);
                }
            }
        }
        let pristine = std::fs::read(path.join("image")).expect("just made");
        Fixture { dir, pristine }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    /// Damages a fresh copy of the image and compares both checks.
    fn compare(&self, name: &str, damage: impl FnOnce(&mut Image)) -> Verdict {
        let mut image = Image {
            bytes: self.pristine.clone(),
        };
        damage(&mut image);
        std::fs::write(self.path(), &image.bytes).expect("a writable directory");
        compare(&self.path(), name)
    }
}

/// Compares both checks of one file.
fn compare(path: &Path, name: &str) -> Verdict {
    let (theirs, ours) = (qemu_verdict(path), vellum_verdict(path));
    assert_eq!(
        ours.exit_code, theirs.exit_code,
        "{name}: {ours:?}\n{theirs:?}"
    );
    if ours.report.is_some() && theirs.report.is_some() {
        assert_eq!(ours, theirs, "{name}");
    }
    assert_eq!(
        ours.report.is_some(),
        theirs.report.is_some(),
        "{name}: {ours:?}\n{theirs:?}"
    );
    ours
}

const WRITES: [&str; 4] = [
    "write -P 1 0 300k",
    "write -P 2 1M 130k",
    "write -P 3 2M 64k",
    "write -z 3M 128k",
];

#[test]
fn undamaged_images_have_the_same_counts() {
    let kinds = [
        "compat=0.10",
        "compat=1.1",
        "cluster_size=512",
        "cluster_size=4k",
        "cluster_size=2M",
        "extended_l2=on",
        "extended_l2=on,cluster_size=16k",
        "refcount_bits=1",
        "refcount_bits=2,cluster_size=512",
        "refcount_bits=4",
        "refcount_bits=8",
        "refcount_bits=32,cluster_size=1k",
        "refcount_bits=64",
        "data_file=data",
        "data_file=data,data_file_raw=on",
        "preallocation=metadata,cluster_size=4k",
        "compression_type=zstd",
    ];
    for kind in kinds {
        let mut steps = WRITES.to_vec();
        // Compressed clusters and snapshots need counts of dozens.
        let narrow = [
            "refcount_bits=1",
            "refcount_bits=2,cluster_size=512",
            "refcount_bits=4",
        ]
        .contains(&kind);
        if !kind.contains("data_file") && !narrow {
            // QEMU compresses only what has no cluster yet.
            if !kind.contains("preallocation") {
                steps.push("write -c -P 5 4M 2M");
            }
            steps.extend(["qemu-img snapshot -c one image", "write -P 9 64k 900k"]);
            steps.push("qemu-img snapshot -c two image");
        }
        if kind != "compat=0.10" {
            steps.push("qemu-img bitmap --add image b");
        }
        let fixture = Fixture::new(kind, &steps);
        let verdict = fixture.compare(kind, |_| ());
        assert_eq!(verdict.exit_code, 0, "{kind}: {verdict:?}");
    }
}

type Damage = (&'static str, fn(&mut Image));

const MAPPING_DAMAGES: &[Damage] = &[
    ("copied flag clear", |i| i.change(i.l2(0), |e| e & !COPIED)),
    ("copied flag set on nothing", |i| i.put64(i.l2(100), COPIED)),
    ("two entries, one cluster", |i| {
        i.put64(i.l2(1), i.be64(i.l2(0)))
    }),
    ("entry lost", |i| i.put64(i.l2(1), 0)),
    ("L2 table lost", |i| i.put64(i.l1(0), 0)),
    ("L1 copied flag clear", |i| {
        i.change(i.l1(0), |e| e & !COPIED)
    }),
    ("L1 with flags only", |i| i.put64(i.l1(0), COPIED)),
    ("data unaligned", |i| i.change(i.l2(2), |e| e + 512)),
    ("preallocated unaligned", |i| {
        i.change(i.l2(2), |e| (e + 512) | 1)
    }),
    ("reserved bits in L2", |i| {
        i.change(i.l2(2), |e| e | 0x0100_0000_0000_0008)
    }),
    ("reserved bits in L1", |i| {
        i.change(i.l1(0), |e| e | 0x0100_0000_0000_0008)
    }),
    ("L2 table unaligned", |i| i.change(i.l1(0), |e| e + 512)),
    ("data in the header", |i| i.put64(i.l2(3), COPIED | 512)),
    ("data beyond the end", |i| {
        i.put64(i.l2(3), COPIED | (1 << 40))
    }),
    ("data just beyond the end", |i| {
        let end = (i.bytes.len() as u64).next_multiple_of(i.cluster_size());
        i.put64(i.l2(3), COPIED | end);
    }),
    ("L2 table beyond the end", |i| {
        i.put64(i.l1(0), COPIED | (1 << 41))
    }),
    ("data in the L1 table", |i| {
        i.put64(i.l2(3), COPIED | i.be64(40))
    }),
    ("data in the refcount block", |i| {
        i.put64(i.l2(3), COPIED | i.be64(i.refcount_table(0)))
    }),
    ("zero flag on data", |i| i.change(i.l2(0), |e| e | 1)),
    ("compressed and copied", |i| {
        i.put64(i.l2(3), COPIED | COMPRESSED | 0x30_0000)
    }),
    ("compressed beyond the end", |i| {
        i.put64(i.l2(3), COMPRESSED | (1 << 45))
    }),
    ("compressed at the limit", |i| {
        i.put64(i.l2(3), COMPRESSED | 0x3fff_ffff_ffff_ffff)
    }),
    ("L2 of all ones", |i| i.put64(i.l2(3), u64::MAX)),
    ("file cut", |i| i.bytes.truncate(i.bytes.len() - 100_000)),
    ("file cut a little", |i| {
        i.bytes.truncate(i.bytes.len() - 700)
    }),
    ("file cut to its tables", |i| i.bytes.truncate(5 * 65536)),
    ("file longer", |i| {
        i.bytes.resize(i.bytes.len() + 200_000, 0)
    }),
    ("dirty", |i| i.change(72, |bits| bits | 1)),
    ("corrupt", |i| i.change(72, |bits| bits | 2)),
];

const REFCOUNT_DAMAGES: &[Damage] = &[
    ("count 0", |i| i.set_refcount(6, 0)),
    ("count 5", |i| i.set_refcount(6, 5)),
    ("count of the header 0", |i| i.set_refcount(0, 0)),
    ("count of nothing 1", |i| i.set_refcount(90, 1)),
    ("count beyond the end 1", |i| i.set_refcount(20_000, 1)),
    ("block lost", |i| i.put64(i.refcount_table(0), 0)),
    ("block unaligned", |i| {
        i.change(i.refcount_table(0), |e| e + 512)
    }),
    ("block with reserved bits", |i| {
        i.change(i.refcount_table(0), |e| e + 1)
    }),
    ("block outside", |i| i.put64(i.refcount_table(1), 1 << 40)),
    ("block far outside", |i| {
        i.put64(i.refcount_table(1), 1 << 60)
    }),
    ("the block beyond the longest file", |i| {
        i.change(i.refcount_table(0), |e| e | 1 << 63)
    }),
    ("the block just beyond the longest file", |i| {
        i.put64(i.refcount_table(0), 0x7fff_ffff_c000_0000)
    }),
    ("the block at the end of the longest file", |i| {
        let end = 0x7fff_ffff_c000_0000 - i.cluster_size();
        i.put64(i.refcount_table(0), end);
    }),
    ("one block twice", |i| {
        i.put64(i.refcount_table(1), i.be64(i.refcount_table(0)))
    }),
    ("another block unaligned", |i| {
        i.put64(i.refcount_table(1), 0x1_0200)
    }),
    ("block in the header", |i| i.put64(i.refcount_table(1), 512)),
    ("no table", |i| i.put32(56, 0)),
    ("table beyond the end", |i| i.put64(48, 1 << 40)),
    ("table unaligned", |i| i.put64(48, 0x1_0200)),
];

#[test]
fn damaged_mappings_are_found_as_by_qemu() {
    for kind in [
        "compat=1.1",
        "compat=0.10",
        "cluster_size=4k,refcount_bits=8",
    ] {
        let fixture = Fixture::new(kind, &WRITES);
        for (name, damage) in MAPPING_DAMAGES {
            // Version 2 has no feature bits: there these are extensions.
            if kind == "compat=0.10" && ["dirty", "corrupt"].contains(name) {
                continue;
            }
            fixture.compare(&format!("{kind}: {name}"), damage);
        }
    }
}

#[test]
fn damaged_refcounts_are_found_as_by_qemu() {
    let fixture = Fixture::new("compat=1.1", &WRITES);
    for (name, damage) in REFCOUNT_DAMAGES {
        fixture.compare(name, damage);
    }
}

#[test]
fn damaged_snapshots_are_found_as_by_qemu() {
    let steps = [
        "write 0 300k",
        "qemu-img snapshot -c one image",
        "write 0 64k",
    ];
    let damages: &[Damage] = &[
        ("L1 lost", |i| i.put64(i.snapshots(), 0)),
        ("L1 unaligned", |i| {
            i.change(i.snapshots(), |offset| offset + 512)
        }),
        ("L1 too large", |i| i.put32(i.snapshots() + 8, 1 << 30)),
        ("L1 longer than the file", |i| {
            i.put32(i.snapshots() + 8, 1 << 20)
        }),
        ("too little extra data", |i| i.put32(i.snapshots() + 36, 8)),
        ("too much extra data", |i| i.put32(i.snapshots() + 36, 4096)),
        ("one too many", |i| i.put32(60, 2)),
        ("far too many", |i| i.put32(60, 70_000)),
        ("table unaligned", |i| i.change(64, |offset| offset + 8)),
        ("table beyond the end", |i| i.put64(64, 1 << 40)),
        ("snapshots forgotten", |i| i.put32(60, 0)),
        ("shared cluster lost in the active table", |i| {
            i.put64(i.l2(2), 0)
        }),
        ("shared table unaligned data", |i| {
            let l1 = i.be64(i.snapshots());
            let l2 = i.be64(l1) & OFFSET;
            i.change(l2 + 8, |entry| entry + 512);
        }),
    ];
    for kind in ["compat=1.1", "compat=0.10"] {
        let fixture = Fixture::new(kind, &steps);
        for (name, damage) in damages {
            fixture.compare(&format!("{kind}: {name}"), damage);
        }
    }
    let fixture = Fixture::new("compat=1.1,refcount_bits=2", &steps);
    fixture.compare("more references than fit", |i| {
        for index in 1..9 {
            i.put64(i.l2(index), i.be64(i.l2(1)));
        }
    });
}

#[test]
fn damaged_bitmaps_are_found_as_by_qemu() {
    let steps = [
        "write 0 300k",
        "qemu-img bitmap --add -g 64k image first",
        "qemu-img bitmap --add image second",
        "write 1M 64k",
    ];
    let fixture = Fixture::new("compat=1.1", &steps);
    let table = |i: &Image| i.be64(i.bitmap_directory());
    fixture.compare("undamaged", |_| ());
    fixture.compare("not vouched for", |i| i.put64(88, 0));
    fixture.compare("table lost", |i| i.put64(i.bitmap_directory(), 0));
    fixture.compare("table unaligned", |i| {
        i.change(i.bitmap_directory(), |o| o + 512)
    });
    fixture.compare("entry reserved bits", |i| i.put64(table(i), 1 << 60));
    fixture.compare("entry all ones", |i| i.put64(table(i), 1));
    fixture.compare("entry ones with place", |i| i.put64(table(i), 0x3_0001));
    fixture.compare("entry at shared cluster", |i| i.put64(table(i), 0x3_0000));
    fixture.compare("entry beyond the end", |i| i.put64(table(i), 1 << 40));
    fixture.compare("too few", |i| i.put32(i.extension(0x2385_2875), 1));
    fixture.compare("too many", |i| i.put32(i.extension(0x2385_2875), 3));
    fixture.compare("wrong type", |i| {
        i.change(i.bitmap_directory() + 16, |rest| rest ^ 3 << 56)
    });
    fixture.compare("wrong granularity", |i| {
        i.change(i.bitmap_directory() + 16, |rest| rest | 63 << 48)
    });
}

/// QEMU opens no image with such a bitmap. It may have been meant for another granularity, so nobody is
/// to take what it calls clean for unchanged.
#[test]
fn a_bitmap_whose_table_is_too_long_is_damage_and_trusted_by_nobody() {
    let steps = [
        "qemu-img bitmap --add -g 512 image first",
        "qemu-img bitmap --add image second",
    ];
    let fixture = Fixture::new("compat=1.1,cluster_size=512", &steps);
    let mut image = Image {
        bytes: fixture.pristine.clone(),
    };
    // 16384 bits are four clusters of bits.
    image.change(image.bitmap_directory() + 8, |sizes| sizes + (1 << 32));
    std::fs::write(fixture.path(), &image.bytes).expect("a writable directory");
    let info = qemu("qemu-img", fixture.dir.path(), &["info", "image"]);
    assert!(!info.status.success());
    let verdict = vellum_verdict(&fixture.path());
    assert_eq!((verdict.exit_code, verdict.messages.len()), (2, 1));
    let storage = open(&fixture.path(), Create::No);
    let options = CheckOptions::default();
    let report = lane::block_on(repair(storage, Fix::All, &options)).expect("repaired");
    assert_eq!((report.corruptions_fixed, report.corruptions), (1, 0));
    let verdict = compare(&fixture.path(), "repaired");
    assert_eq!((verdict.exit_code, verdict.messages), (0, vec![]));
    let info = qemu_ok("qemu-img", fixture.dir.path(), &["info", "image"]);
    assert_eq!(info.matches("in-use").count(), 1, "{info}");
    assert!(info.contains("name: second"), "{info}");
}

/// QEMU cannot open most of these at all, so nobody could repair them with it.
#[test]
fn broken_bitmaps_are_given_up_by_a_repair_and_nothing_else_is() {
    type Damage = fn(&mut Image);
    fn table(image: &Image) -> u64 {
        image.be64(image.bitmap_directory())
    }
    let steps = [
        "write -P 5 0 300k",
        "qemu-img bitmap --add -g 64k image first",
        "qemu-img bitmap --add image second",
        "write -P 6 1M 64k",
    ];
    let fixture = Fixture::new("compat=1.1", &steps);
    let cases: [(&str, Damage); 8] = [
        ("table too short", |i| i.put32(i.bitmap_directory() + 8, 0)),
        ("directory lost", |i| i.put64(i.bitmap_directory() + 16, 0)),
        ("directory elsewhere", |i| {
            i.put64(i.extension(0x2385_2875) + 16, 1 << 40)
        }),
        ("directory cut", |i| {
            i.put64(i.extension(0x2385_2875) + 8, 8)
        }),
        ("too many", |i| i.put32(i.extension(0x2385_2875), 3)),
        ("table beyond the end", |i| {
            i.put64(i.bitmap_directory(), 1 << 40)
        }),
        ("entry reserved bits", |i| i.put64(table(i), 1 << 60)),
        ("entry beyond the end", |i| i.put64(table(i), 1 << 40)),
    ];
    for (name, damage) in cases {
        let mut image = Image {
            bytes: fixture.pristine.clone(),
        };
        damage(&mut image);
        std::fs::write(fixture.path(), &image.bytes).expect("a writable directory");
        let report = lane::block_on(async {
            let storage = open(&fixture.path(), Create::No);
            let leaks = repair(storage.clone(), Fix::Leaks, &CheckOptions::default()).await;
            let gone = leaks.is_ok_and(|report| report.corruptions == 0);
            assert!(!gone, "{name}: bitmaps are not given up for leaks alone");
            repair(storage, Fix::All, &CheckOptions::default()).await
        });
        let report = report.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((report.corruptions, report.check_errors), (0, 0), "{name}");
        let verdict = compare(&fixture.path(), name);
        assert_eq!((verdict.exit_code, verdict.messages), (0, vec![]), "{name}");
        let info = qemu_ok("qemu-img", fixture.dir.path(), &["info", "image"]);
        assert!(!info.contains("bitmaps"), "{name}: {info}");
        let read = [
            "-r",
            "-f",
            "qcow2",
            "-c",
            "read -P 5 0 300k",
            "-c",
            "read -P 6 1M 64k",
            "image",
        ];
        let text = qemu_ok("qemu-io", fixture.dir.path(), &read);
        assert!(!text.contains("verification failed"), "{name}: {text}");
    }
}

#[test]
fn damaged_subclusters_are_found_as_by_qemu() {
    let fixture = Fixture::new(
        "extended_l2=on",
        &["write 0 200k", "write 1M 2k", "write -c 2M 64k"],
    );
    let compressed = 2 * (32 * 1024 / 1024);
    fixture.compare("undamaged", |_| ());
    fixture.compare("data and zero", |i| {
        i.change(i.l2(1), |bits| bits | 1 << 32)
    });
    fixture.compare("data without a place", |i| i.put64(i.l2(201), 7));
    fixture.compare("zero without a place", |i| i.put64(i.l2(201), 7 << 32));
    fixture.compare("zero flag", |i| i.change(i.l2(0), |entry| entry | 1));
    fixture.compare("data unaligned", |i| i.change(i.l2(2), |entry| entry + 512));
    fixture.compare("preallocated unaligned", |i| {
        i.change(i.l2(2), |entry| entry + 512);
        i.put64(i.l2(3), 0);
    });
    fixture.compare("compressed with a bitmap", |i| {
        i.put64(i.l2(compressed + 1), 1)
    });
}

#[test]
fn damaged_images_with_data_files_are_found_as_by_qemu() {
    let fixture = Fixture::new("data_file=data", &["write 0 200k"]);
    fixture.compare("undamaged", |_| ());
    fixture.compare("copied flag clear", |i| {
        i.change(i.l2(1), |entry| entry & !COPIED)
    });
    fixture.compare("no place", |i| i.put64(i.l2(0), 0));
    fixture.compare("compressed", |i| i.put64(i.l2(1), COMPRESSED | 0x1_0000));
    fixture.compare("beyond every end", |i| i.put64(i.l2(1), COPIED | (1 << 50)));
}

#[test]
fn random_damage_is_found_as_by_qemu() {
    let kinds = [
        "cluster_size=512",
        "cluster_size=4k,refcount_bits=8",
        "cluster_size=16k,extended_l2=on",
    ];
    for kind in kinds {
        let mut steps = WRITES.to_vec();
        steps.extend([
            "write -c 4M 128k",
            "qemu-img snapshot -c one image",
            "write 0 64k",
        ]);
        let fixture = Fixture::new(kind, &steps);
        let pristine = Image {
            bytes: fixture.pristine.clone(),
        };
        let mut random = Random::new(0x9e37_79b9_7f4a_7c15);
        for round in 0..25 {
            let mut log = String::new();
            let mut damage = |image: &mut Image| {
                for _ in 0..=random.below(3) {
                    let (at, bit) = damage_place(&pristine, &mut random);
                    log += &format!(" {at:#x}^{bit:#x}");
                    image.bytes[at as usize] ^= bit;
                }
            };
            let mut image = Image {
                bytes: fixture.pristine.clone(),
            };
            damage(&mut image);
            std::fs::write(fixture.path(), &image.bytes).expect("a writable directory");
            compare(&fixture.path(), &format!("{kind}, round {round}:{log}"));
        }
    }
}

/// A byte of some table, and which bit of it to flip.
fn damage_place(image: &Image, random: &mut Random) -> (u64, u8) {
    let l1_entries = image.be32(36);
    let (start, len) = match random.below(6) {
        0 => (image.l1(0), l1_entries * 8),
        1 | 2 => (image.l2(0), image.cluster_size().min(512)),
        3 => (image.refcount_table(0), 32),
        4 => (
            image.be64(image.refcount_table(0)),
            image.cluster_size().min(512),
        ),
        _ => (image.snapshots(), 64),
    };
    (start + random.below(len), 1 << random.below(8))
}

//! `check` beside the real one.

use std::os::unix::fs::FileExt;

use crate::twins::Twins;

const IMAGES: &[&str] = &[
    "qemu-img create -q -f qcow2 a 10M",
    "qemu-io a: write 1M 100k; write -z 5M 64k; write 9M 1k",
    "qemu-img convert -c -O qcow2 a c",
    "qemu-img create -q -f qcow2 -o cluster_size=512,refcount_bits=2 s 1M",
    "qemu-io s: write 0 300k",
    "qemu-img create -q -f raw r 1M",
    "qemu-img create -q -f qcow2 -u -b none -F raw n 10M",
];

/// Changes bytes of an image in both folders.
fn damage(twins: &Twins, name: &str, offset_bytes: u64, bytes: &[u8]) {
    let ours = twins.ours(name);
    let theirs = twins.ours("../theirs").join(name);
    for path in [ours, theirs] {
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(path)
            .expect("the image");
        file.write_all_at(bytes, offset_bytes).expect("a write");
    }
}

#[test]
fn sound_images_are_counted_alike() {
    let twins = Twins::new(IMAGES);
    for image in ["a", "c", "s"] {
        let answer = twins.same(&format!("check {image}"));
        assert_eq!(answer.code, Some(0));
        twins.same(&format!("check --output=json {image}"));
    }
}

#[test]
fn damage_and_leaks_have_their_own_codes() {
    let twins = Twins::new(IMAGES);
    // Refcounts are 16 bits wide and begin at the third cluster.
    let counts = 2 * 65536;
    damage(&twins, "a", counts + 2 * 5, &[0, 0]);
    assert_eq!(twins.same("check a").code, Some(2));
    twins.same("check --output=json a");
    damage(&twins, "a", counts + 2 * 5, &[0, 1]);
    damage(&twins, "a", counts + 2 * 40, &[0, 1]);
    let length = twins.ours("a").metadata().expect("the image").len();
    damage(&twins, "a", length.max(41 * 65536) - 1, &[0]);
    assert_eq!(twins.same("check a").code, Some(3));
    twins.all_same(&["check -q a", "check --output=json a"]);
}

#[test]
fn what_cannot_be_checked_says_so() {
    let twins = Twins::new(IMAGES);
    assert_eq!(twins.same("check r").code, Some(63));
    twins.all_same(&[
        "check",
        "check none",
        "check n",
        "check -f qcow2 r",
        "check -r foo a",
        "check -U -r all a",
        "check -r all r",
        "check -r all none",
        "check -T foo a",
        "check --output=foo a",
    ]);
}

/// The places of an image's tables.
struct Layout(Vec<u8>);

impl Layout {
    fn of(twins: &Twins, name: &str) -> Layout {
        Layout(std::fs::read(twins.ours(name)).expect("the image"))
    }

    fn be64(&self, at: u64) -> u64 {
        let at = at as usize;
        u64::from_be_bytes(self.0[at..at + 8].try_into().expect("eight bytes"))
    }

    fn l1(&self) -> u64 {
        self.be64(40)
    }

    fn l2(&self, index: u64) -> u64 {
        (self.be64(self.l1()) & 0x00ff_ffff_ffff_fe00) + index * 8
    }

    fn table(&self) -> u64 {
        self.be64(48)
    }

    fn count(&self, cluster: u64) -> u64 {
        self.be64(self.table()) + cluster * 2
    }
}

/// Where something is broken, and with what.
type Damage = (&'static str, fn(&Layout) -> (u64, Vec<u8>));

const COPIED: u64 = 1 << 63;

fn word(value: u64) -> Vec<u8> {
    value.to_be_bytes().to_vec()
}

const DAMAGES: &[Damage] = &[
    ("nothing", |i| (0, word(i.be64(0)))),
    ("two entries, one cluster", |i| {
        (i.l2(17), word(i.be64(i.l2(16))))
    }),
    ("entry lost", |i| (i.l2(16), word(0))),
    ("entry beyond the end", |i| {
        (i.l2(16), word(COPIED | 1 << 40))
    }),
    ("entry unaligned", |i| {
        (i.l2(16), word(i.be64(i.l2(16)) + 512))
    }),
    ("zero entry unaligned", |i| {
        (i.l2(16), word(i.be64(i.l2(16)) + 513))
    }),
    ("reserved bits", |i| (i.l2(16), word(i.be64(i.l2(16)) | 8))),
    ("flag clear", |i| {
        (i.l2(16), word(i.be64(i.l2(16)) & !COPIED))
    }),
    ("entry into the L1 table", |i| {
        (i.l2(3), word(COPIED | i.l1()))
    }),
    ("entry into the refcounts", |i| {
        (i.l2(3), word(COPIED | i.count(0)))
    }),
    ("L2 table lost", |i| (i.l1(), word(0))),
    ("L2 flag clear", |i| {
        (i.l1(), word(i.be64(i.l1()) & !COPIED))
    }),
    ("L2 table beyond the end", |i| {
        (i.l1(), word(COPIED | 1 << 41))
    }),
    ("counts too high", |i| (i.count(4), vec![0, 5, 0, 5])),
    ("count 0", |i| (i.count(5), vec![0, 0])),
    ("all counts 0", |i| (i.count(0), vec![0; 40])),
    ("count of the header 0", |i| (i.count(0), vec![0, 0])),
    ("block lost", |i| (i.table(), word(0))),
    ("block outside", |i| (i.table() + 8, word(0x10_0000))),
    ("no table", |_| (48, vec![0; 12])),
    ("dirty", |_| (72, word(1))),
    ("corrupt", |_| (72, word(2))),
];

#[test]
fn damage_is_repaired_alike() {
    for (name, damage_of) in DAMAGES {
        for fix in ["leaks", "all"] {
            let twins = Twins::new(IMAGES);
            let (offset, bytes) = damage_of(&Layout::of(&twins, "a"));
            damage(&twins, "a", offset, &bytes);
            let words = format!("check -r {fix} a");
            let words: Vec<&str> = words.split(' ').collect();
            let [mut ours, mut theirs] = twins.both(&words);
            // New refcounts need not lie in the same place.
            let end = |line: &&str| !line.starts_with("Image end offset");
            for answer in [&mut ours, &mut theirs] {
                answer.out = answer.out.lines().filter(end).collect();
            }
            assert_eq!(ours, theirs, "{name}, -r {fix}");
            let words = ["check", "a"];
            let ours = twins.run_ours(&words);
            assert_eq!(ours, twins.run_theirs_on_ours(&words), "{name}, -r {fix}");
            assert_eq!(ours.code, twins.both(&words)[1].code, "{name}, -r {fix}");
        }
    }
}

#[test]
fn refcounts_that_are_nowhere_say_so() {
    let twins = Twins::new(IMAGES);
    let table = Layout::of(&twins, "a").table();
    damage(&twins, "a", table, &word(0x2_0200));
    assert_eq!(twins.same("check a").code, Some(1));
    assert_eq!(twins.run_ours(&["check", "-r", "all", "a"]).code, Some(0));
    assert_eq!(twins.run_theirs_on_ours(&["check", "a"]).code, Some(0));
}

#[test]
fn repairs_are_told_as_json() {
    let twins = Twins::new(IMAGES);
    let layout = Layout::of(&twins, "a");
    damage(&twins, "a", layout.count(0), &[0, 2]);
    damage(&twins, "a", layout.l1(), &[0]);
    assert_eq!(twins.same("check -r all --output=json a").code, Some(0));
    twins.same("check -q -r all a");
}

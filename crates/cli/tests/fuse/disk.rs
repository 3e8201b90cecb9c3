//! What a program sees that uses the file.

use std::fs::{self, File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};

use crate::place::{Place, is_mounted, transports};
use vellum_testing::until;

const SIZE_BYTES: usize = 8 << 20;
const KEEP: FallocateFlags = FallocateFlags::KEEP_SIZE;
const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(KEEP);
const ZERO: FallocateFlags = FallocateFlags::ZERO_RANGE.union(KEEP);

fn open(place: &Place) -> File {
    let mut options = File::options();
    options
        .read(true)
        .write(true)
        .open(place.path("disk"))
        .expect("the disk")
}

fn errno<T>(result: Result<T, impl Into<std::io::Error>>) -> Option<i32> {
    result.err().and_then(|error| error.into().raw_os_error())
}

/// A range that is aligned now and then, and not too long.
fn range(random: &mut fastrand::Rng) -> (usize, usize) {
    let unit = random.choice([1, 512, 4096, 65536]).expect("a unit");
    let from = random.usize(..SIZE_BYTES) / unit * unit;
    let most = random.choice([600, 5000, 300_000]).expect("a length");
    let len = random.usize(1..most).next_multiple_of(unit);
    (from, (from + len).min(SIZE_BYTES))
}

fn change(file: &File, model: &mut [u8], random: &mut fastrand::Rng) {
    let (from, end) = range(random);
    let (at, len) = (from as u64, (end - from) as u64);
    match random.u32(..10) {
        0..5 => {
            random.fill(&mut model[from..end]);
            file.write_all_at(&model[from..end], at).expect("a write");
        }
        5 => {
            fallocate(file, PUNCH, at, len).expect("a hole");
            model[from..end].fill(0);
        }
        6 => {
            fallocate(file, ZERO, at, len).expect("zeroes");
            model[from..end].fill(0);
        }
        7 => file.sync_data().expect("a sync"),
        _ => {
            let mut bytes = vec![1; end - from];
            file.read_exact_at(&mut bytes, at).expect("a read");
            assert!(bytes == model[from..end], "{from:#x} to {end:#x}");
        }
    }
}

#[test]
fn requests_of_all_kinds_do_what_the_model_says() {
    check_against_model(&Place::new("8M"), &[], 17);
}

/// Compares what requests of all kinds give and leave with what they should.
pub fn check_against_model(place: &Place, options: &[&str], seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut model = vec![0; SIZE_BYTES];
    for _ in 0..2 {
        let server = place.mount(options);
        let file = open(place);
        for _ in 0..400 {
            change(&file, &mut model, &mut random);
        }
        let whole = fs::read(place.path("disk")).expect("the disk");
        assert!(whole == model);
        drop(file);
        server.end();
        place.check_image(&model);
    }
}

#[test]
fn readers_and_writers_at_once_see_their_own_bytes() {
    for transport in transports() {
        check_readers_and_writers(transport);
    }
}

fn check_readers_and_writers(transport: &str) {
    let place = Place::new("8M");
    let server = place.mount(&[transport]);
    let part = SIZE_BYTES / 8;
    let work = |number: usize| {
        let file = open(&place);
        let mut random = fastrand::Rng::with_seed(number as u64);
        let mut model = vec![0; part];
        for _ in 0..200 {
            let from = random.usize(..part);
            let end = (from + random.usize(1..9000)).min(part);
            random.fill(&mut model[from..end]);
            let at = (number * part + from) as u64;
            file.write_all_at(&model[from..end], at).expect("a write");
            let mut bytes = vec![0; end - from];
            file.read_exact_at(&mut bytes, at).expect("a read");
            assert!(bytes == model[from..end]);
        }
        model
    };
    let model: Vec<u8> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|n| scope.spawn(move || work(n))).collect();
        let parts = threads
            .into_iter()
            .flat_map(|t| t.join().expect("a thread"));
        parts.collect()
    });
    server.end();
    place.check_image(&model);
}

#[test]
fn holes_are_found_and_space_is_counted() {
    let place = Place::new("8M");
    let server = place.mount(&[]);
    let file = open(&place);
    let before = file.metadata().expect("metadata").blocks();
    file.write_all_at(&[1; 65536], 1 << 20).expect("a write");
    file.sync_all().expect("a sync");
    let find = |from| seek(&file, from);
    assert_eq!(find(SeekFrom::Data(0)), Ok(1 << 20));
    assert_eq!(find(SeekFrom::Hole(0)), Ok(0));
    assert_eq!(find(SeekFrom::Hole(1 << 20)), Ok((1 << 20) + 65536));
    let beyond = find(SeekFrom::Data((1 << 20) + 65536));
    assert_eq!(errno(beyond), Some(libc::ENXIO));
    let found = fs::metadata(place.path("disk")).expect("metadata");
    assert_eq!(found.len(), SIZE_BYTES as u64);
    assert!(found.blocks() > before && found.blocks() < 2048);
    assert_eq!(found.permissions().mode(), libc::S_IFREG | 0o600);
    // What has its space needs no more; what has none cannot get it without a write.
    fallocate(&file, KEEP, 1 << 20, 65536).expect("allocated already");
    assert_eq!(
        errno(fallocate(&file, KEEP, 0, 65536)),
        Some(libc::EOPNOTSUPP)
    );
    let unknown = fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 65536);
    assert_eq!(errno(unknown), Some(libc::EOPNOTSUPP));
    server.end();
}

#[test]
fn a_disk_grows_only_where_it_may() {
    let place = Place::new("8M");
    let end = SIZE_BYTES as u64;
    let server = place.mount(&[]);
    let file = open(&place);
    assert_eq!(errno(file.write_at(b"x", end)), Some(libc::EIO));
    assert_eq!(errno(file.set_len(0)), Some(libc::EPERM));
    assert_eq!(errno(file.set_len(end)), None);
    let grow = FallocateFlags::empty();
    assert_eq!(errno(fallocate(&file, grow, end, 4096)), Some(libc::ENOSPC));
    assert_eq!(file.write_at(&[7; 100], end - 10).expect("a part"), 10);
    drop(file);
    server.end();

    let server = place.mount(&["--growable"]);
    let file = open(&place);
    file.write_all_at(b"more", end + 100_000).expect("a write");
    fallocate(&file, FallocateFlags::empty(), end + (1 << 20), 65536).expect("space");
    let len = || file.metadata().expect("metadata").len();
    assert_eq!(len(), end + (1 << 20) + 65536);
    file.set_len(end + 200_704).expect("shorter");
    fallocate(&file, FallocateFlags::ZERO_RANGE, end + 400_000, 112).expect("zeroes");
    // Disks end with a sector.
    assert_eq!(len(), end + 400_384);
    drop(file);
    server.end();
    let mut model = vec![0; SIZE_BYTES + 400_384];
    model[SIZE_BYTES - 10..SIZE_BYTES].fill(7);
    model[SIZE_BYTES + 100_000..][..4].copy_from_slice(b"more");
    place.check_image(&model);
}

#[test]
fn programs_that_truncate_what_they_write_cut_only_a_growable_disk() {
    for options in [&[][..], &["--growable"]] {
        let place = Place::new("8M");
        place.io("image", &["write -q -P 5 0 8M"]);
        let server = place.mount(options);
        overwrite(&place, options.is_empty());
        server.end();
    }
}

/// Writes over the start of the disk as `cp`, `dd` and a shell do.
pub fn overwrite(place: &Place, keeps_size: bool) {
    fs::write(place.path("new"), vec![7; 65536]).expect("a file");
    let (new, disk) = (place.name("new"), place.name("disk"));
    let to_disk = [&format!("if={new}"), &format!("of={disk}"), "status=none"];
    let empty = format!(": > {disk}");
    let programs: [(&str, &[&str], usize); 3] = [
        ("sh", &["-c", &empty], 0),
        ("cp", &[&new, &disk], 65536),
        ("dd", &to_disk, 65536),
    ];
    for (program, words, written) in programs {
        place.must(program, words);
        let held = fs::read(place.path("disk")).expect("the disk");
        assert!(held[..written] == vec![7; written], "{program}");
        if keeps_size {
            assert_eq!(held.len(), SIZE_BYTES, "{program}");
            assert!(held[written..].iter().all(|&byte| byte == 5), "{program}");
        } else {
            assert_eq!(held.len(), written, "{program}");
        }
    }
}

#[test]
fn nothing_changes_where_only_reading_is_allowed() {
    let place = Place::new("8M");
    place.io("image", &["write -P 5 0 1M"]);
    let server = place.mount(&["--read-only"]);
    let disk = place.path("disk");
    let writer = File::options().write(true).open(&disk);
    assert_eq!(errno(writer), Some(libc::EROFS));
    for mode in [0o600, 0o500] {
        let changed = fs::set_permissions(&disk, Permissions::from_mode(mode));
        assert_eq!(errno(changed), Some(libc::EROFS));
    }
    let file = File::open(&disk).expect("the disk");
    let mut bytes = [0; 4096];
    file.read_exact_at(&mut bytes, (1 << 20) - 2048)
        .expect("a read");
    assert!(bytes[..2048] == [5; 2048] && bytes[2048..] == [0; 2048]);
    server.end();
}

#[test]
fn an_unmount_ends_the_program_and_nothing_is_lost() {
    let place = Place::new("8M");
    for (byte, is_open) in [(1, false), (2, true)] {
        let mut server = place.mount(&[]);
        let file = open(&place);
        file.write_all_at(&[byte; 5000], 3000).expect("a write");
        match is_open {
            // Whoever has it open keeps it until the end.
            true => server.signal("-INT"),
            false => {
                drop(file);
                place.must("umount", &[&place.name("disk")]);
            }
        }
        assert_eq!(server.wait(), Some(0));
        let mut model = vec![0; SIZE_BYTES];
        model[3000..8000].fill(byte);
        place.check_image(&model);
    }
}

/// `umount` returns while the server has the image open: what was written must be there by then.
#[test]
fn an_image_that_is_copied_has_what_was_written_to_files_that_are_closed() {
    let place = Place::new("8M");
    let server = place.mount(&[]);
    let file = open(&place);
    file.write_all_at(&vec![7; 4 << 20], 0).expect("a write");
    drop(file);
    fs::copy(place.path("image"), place.path("copy")).expect("a copy");
    server.end();
    let convert = ["convert", "-f", "qcow2", "-O", "raw", "copy", "raw"];
    place.img(&convert);
    let held = fs::read(place.path("raw")).expect("the copy");
    assert!(held[..4 << 20].iter().all(|&byte| byte == 7));
}

/// Only its own mount is taken away, and that wherever it is by then.
#[test]
fn a_server_that_ends_leaves_the_mounts_of_others() {
    let place = Place::new("8M");
    place.img("create -q -f qcow2 other 1M");
    fs::create_dir(place.path("before")).expect("a folder");
    place.touch("before/disk");
    let moved = place.start_at(
        "before/disk",
        &["mount", "-f", "qcow2", "image", "before/disk"],
    );
    fs::rename(place.path("before"), place.path("after")).expect("another name");
    assert!(is_mounted(&place.path("after/disk")));
    moved.end();
    assert!(!is_mounted(&place.path("after/disk")));

    let mut below = place.mount(&[]);
    let above = place.start_bare(&["mount", "-f", "qcow2", "other", "disk"]);
    let size_bytes = || fs::metadata(place.path("disk")).expect("the disk").len();
    until("the other disk", || size_bytes() == 1 << 20);
    below.signal("-TERM");
    assert_eq!(below.wait(), Some(0));
    assert_eq!(size_bytes(), 1 << 20, "still there");
    // The mount that the first server had to leave below is gone too.
    above.end();
}

#[test]
fn an_image_that_was_mounted_over_itself_is_mounted_again_after_a_kill() {
    let place = Place::new("8M");
    let server = place.start_at("image", &["mount", "-f", "qcow2", "image", "image"]);
    server.signal("-KILL");
    drop(server);
    until("the end of the mount", || {
        fs::metadata(place.path("image")).is_err()
    });
    place
        .start_at("image", &["mount", "-f", "qcow2", "image", "image"])
        .end();
    place.check_image(&vec![0; SIZE_BYTES]);
}

#[test]
fn what_cannot_be_mounted_over_is_named() {
    let place = Place::new("8M");
    let told = |file: &str| place.refused("vellum", &["mount", "-f", "qcow2", "image", file]);
    assert!(told("missing").contains("Failed to stat '"));
    fs::create_dir(place.path("folder")).expect("a folder");
    assert!(told("folder").contains("/folder' is not a regular file"));
    let missing = fs::metadata(place.path("missing")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
}

//! Servers that are killed.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use crate::loop_mount::Loop;
use crate::place::{Place, Server, is_gone, is_mounted, transports};
use vellum_testing::until;

const BLOCK: usize = 4096;
const WRITERS: usize = 4;
/// Blocks of each writer.
const BLOCKS: usize = 512;
const KILLS: u64 = 6;

fn mount(place: &Place, format: &str, transport: &str) -> Server {
    place.start(&["mount", "-f", format, transport, "image", "disk"])
}

/// Each format over each transport.
fn cases() -> impl Iterator<Item = (&'static str, &'static str)> {
    let each = |format| transports().into_iter().map(move |it| (format, it));
    ["qcow2", "raw"].into_iter().flat_map(each)
}

/// What a block may hold: what was there at the last sync that was acknowledged, and all that was
/// written since then.
type Allowed = Vec<Vec<u32>>;

/// Writes and syncs blocks of its own until the server dies.
fn write_until_killed(file: &File, writer: usize, seed: u64, mut allowed: Allowed) -> Allowed {
    let mut random = fastrand::Rng::with_seed(seed);
    loop {
        for _ in 0..random.usize(1..24) {
            let (block, value) = (random.usize(..BLOCKS), random.u32(1..));
            let at = ((writer * BLOCKS + block) * BLOCK) as u64;
            // What fails may be there nevertheless.
            allowed[block].push(value);
            let bytes = value.to_le_bytes().repeat(BLOCK / 4);
            if file.write_all_at(&bytes, at).is_err() {
                return allowed;
            }
        }
        if file.sync_data().is_err() {
            return allowed;
        }
        for values in &mut allowed {
            values.drain(..values.len() - 1);
        }
    }
}

/// Several writers, who sync at times of their own: what one of them was told is durable is there
/// after a kill, and nothing that nobody wrote.
#[test]
fn what_several_writers_have_synced_survives_kills() {
    for (format, transport) in cases() {
        let place = Place::of_format(format, "8M");
        let mut allowed: Vec<Allowed> = vec![vec![vec![0]; BLOCKS]; WRITERS];
        for kill in 0..KILLS {
            let server = mount(&place, format, transport);
            let mut options = File::options();
            let file = options.read(true).write(true).open(place.path("disk"));
            let file = file.expect("the disk");
            allowed = std::thread::scope(|scope| {
                let start = |(writer, allowed): (usize, Allowed)| {
                    let (file, seed) = (&file, kill * 100 + writer as u64);
                    scope.spawn(move || write_until_killed(file, writer, seed, allowed))
                };
                let writers = std::mem::take(&mut allowed).into_iter().enumerate();
                let writers: Vec<_> = writers.map(start).collect();
                std::thread::sleep(Duration::from_millis(60 + 50 * kill));
                server.signal("-KILL");
                let ended = writers.into_iter().map(|writer| writer.join());
                ended.map(|ended| ended.expect("a writer")).collect()
            });
            drop((file, server));
            let server = mount(&place, format, transport);
            let whole = fs::read(place.path("disk")).expect("the disk");
            server.end();
            for (number, bytes) in whole.chunks_exact(BLOCK).enumerate() {
                let values = &mut allowed[number / BLOCKS][number % BLOCKS];
                let value = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                let is_whole = bytes.chunks_exact(4).all(|it| it == value.to_le_bytes());
                let is_one = is_whole && values.contains(&value);
                assert!(
                    is_one,
                    "{format}, {transport}, kill {kill}, block {number}: {value} of {values:?}"
                );
                *values = vec![value];
            }
        }
        if format == "qcow2" {
            place.img("check -q -r leaks image");
        }
    }
}

/// A file system on a loop device on the file: what it has made durable is there after the server
/// is killed, and it is sound.
#[test]
fn a_file_system_keeps_what_it_has_made_durable() {
    for (format, transport) in cases() {
        let place = Place::of_format(format, "64M");
        let (disk, files) = (place.name("disk"), place.name("files"));
        fs::create_dir(place.path("files")).expect("a folder");
        let server = mount(&place, format, transport);
        place.must("mkfs.ext4", &["-q", "-F", &disk]);
        server.end();
        let mut durable: Vec<(String, Vec<u8>)> = Vec::new();
        for kill in 0..3_u8 {
            let server = mount(&place, format, transport);
            let device = Loop::new(&place);
            place.must("mount", &[&device.device, &files]);
            for number in 0..8_u8 {
                let name = format!("f{kill}-{number}");
                let bytes = vec![kill * 8 + number + 1; 10_000 + 30_000 * usize::from(number)];
                let mut file = File::create(place.path("files").join(&name)).expect("a file");
                file.write_all(&bytes).expect("a write");
                // The last of them are on their way.
                if number < 6 {
                    file.sync_all().expect("a sync");
                    durable.push((name, bytes));
                }
            }
            server.signal("-KILL");
            place.must("umount", &["--lazy", &files]);
            drop((device, server));
            let server = mount(&place, format, transport);
            // The journal is played as the next mount would; it exits with 1 if it did anything.
            let played = place.run("e2fsck", &["-p", &disk]);
            assert!(played.code.is_some_and(|code| code <= 1), "{played:?}");
            place.must("e2fsck", &["-f", "-n", &disk]);
            for (name, bytes) in &durable {
                place.must("debugfs", &["-R", &format!("dump /{name} found"), &disk]);
                let found = fs::read(place.path("found")).expect("a file");
                assert!(
                    found == *bytes,
                    "{format}, {transport}, kill {kill}: {name}"
                );
            }
            server.end();
        }
        if format == "qcow2" {
            place.img("check -q -r leaks image");
        }
    }
}

/// What was synced, or written through, is there when the server is killed; what a dead
/// server has left mounted is replaced.
#[test]
fn acknowledged_syncs_hold_and_dead_mounts_are_replaced() {
    for transport in transports() {
        check_replaced_mounts(transport);
    }
}

fn check_replaced_mounts(transport: &str) {
    let place = Place::new("8M");
    let mut model = vec![0; 8 << 20];
    for round in 0..10_u8 {
        let mut server = place.mount(&[transport]);
        let mut options = File::options();
        let is_through = round % 2 == 1;
        if is_through {
            options.custom_flags(libc::O_DSYNC);
        }
        let file = options.read(true).write(true).open(place.path("disk"));
        let file = file.expect("the disk");
        for number in 0..20 {
            let at = (usize::from(round) * 37 + number * 53) * BLOCK + 100;
            model[at..at + BLOCK].fill(round + 1);
            file.write_all_at(&model[at..at + BLOCK], at as u64)
                .expect("a write");
        }
        if !is_through {
            file.sync_data().expect("a sync");
        }
        server.signal("-KILL");
        assert_eq!(server.wait(), None);
        check_is_dead(&place, transport);
    }
    let server = place.mount(&[transport]);
    let whole = fs::read(place.path("disk")).expect("the disk");
    assert!(whole == model);
    server.end();
    place.img("check -q -r leaks image");
    place.check_image(&model);
}

/// What users of a mount hear whose server was killed.
fn check_is_dead(place: &Place, transport: &str) {
    until("the end of the connection", || {
        let dead = fs::metadata(place.path("disk")).unwrap_err();
        let errno = dead.raw_os_error();
        assert!(is_gone(transport, errno), "{transport}: {dead}");
        errno != Some(libc::ECANCELED)
    });
}

/// Nobody has to wait until the kernel has noticed: it knows the attributes of a dead mount for
/// a second more.
#[test]
fn a_dead_mount_is_replaced_at_once() {
    for transport in transports() {
        let place = Place::new("8M");
        let mut server = place.mount(&[transport]);
        let found = fs::metadata(place.path("disk")).expect("attributes");
        assert_eq!(found.len(), 8 << 20);
        server.signal("-KILL");
        assert_eq!(server.wait(), None);
        let vellum = env!("CARGO_BIN_EXE_vellum");
        let words = ["mount", "--fork", "--pid-file", "pid", "-f", "qcow2"];
        place.must(
            vellum,
            &[&words[..], &[transport, "image", "disk"]].concat(),
        );
        let pid = fs::read_to_string(place.path("pid")).expect("a pid");
        place.must("kill", &["-TERM", pid.trim()]);
        until("the end", || !Path::new("/proc").join(pid.trim()).exists());
        assert!(!is_mounted(&place.path("disk")), "{transport}");
    }
}

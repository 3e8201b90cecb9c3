//! How requests come: over `/dev/fuse`, or over io_uring where the kernel has that.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;
use vellum_testing::Qmp;

use crate::disk::check_against_model;
use crate::place::{Place, Server, is_gone, transports};
use vellum_testing::until;

/// What a kernel without it, or with it switched off, has a user told.
fn reason() -> Option<&'static str> {
    let switch = "/sys/module/fuse/parameters/enable_uring";
    match fs::read_to_string(switch).as_deref().map(str::trim) {
        Ok("Y") => None,
        Ok(_) => Some(
            "FUSE over io_uring is switched off in the kernel: root switches it on with \
             'echo Y > /sys/module/fuse/parameters/enable_uring'",
        ),
        Err(_) => Some("the kernel has no FUSE over io_uring, which came with Linux 6.14"),
    }
}

/// Whoever insists gets it, or hears why not.
#[test]
fn io_uring_is_used_or_refused_where_it_is_forced() {
    let place = Place::new("8M");
    let Some(reason) = reason() else {
        let server = place.mount(&["--io-uring=on"]);
        let mut options = File::options();
        let file = options.read(true).write(true).open(place.path("disk"));
        file.expect("the disk")
            .write_all_at(&[3; 5000], 700)
            .expect("a write");
        server.end();
        let mut model = vec![0; 8 << 20];
        model[700..5700].fill(3);
        return place.check_image(&model);
    };
    let told = place.refused("vellum", "mount -f qcow2 --io-uring=on image disk");
    assert!(told.contains(reason), "{told}");
    assert!(!place.is_served("disk"), "nothing is left mounted");
    // Nobody who does not insist minds.
    place.mount(&["--io-uring=auto"]).end();
}

#[test]
fn every_transport_does_what_the_model_says() {
    for transport in transports() {
        let place = Place::new("8M");
        check_against_model(&place, &[transport], 23);
    }
}

const WRITERS: usize = 8;

/// The daemon with the node `node`, a disk that does a hundred requests a second.
fn start_slow_daemon(place: &Place) -> Server {
    place.start_bare(&[
        "daemon",
        "--object",
        "throttle-group,id=slow,limits.iops-total=100",
        "--blockdev",
        &format!("file,node-name=file,filename={}", place.name("image")),
        "--blockdev",
        "qcow2,node-name=image,file=file",
        "--blockdev",
        "throttle,node-name=node,file=image,throttle-group=slow",
        "--chardev",
        "socket,id=qmp,path=qmp,server=on,wait=off",
        "--monitor",
        "qmp",
    ])
}

/// Where a writer writes one after the other.
fn place_of(writer: usize, block: usize) -> usize {
    (block * WRITERS + writer) % 2048 * 4096
}

/// Writes blocks until that fails; how many, and why no more.
fn write_until_it_fails(file: &File, writer: usize, written: &AtomicUsize) -> (usize, Option<i32>) {
    for block in 0.. {
        let at = place_of(writer, block) as u64;
        if let Err(error) = file.write_all_at(&[writer as u8 + 1; 4096], at) {
            return (block, error.raw_os_error());
        }
        written.fetch_add(1, Ordering::Relaxed);
    }
    unreachable!("there is no end of numbers")
}

/// Requests that a slow disk holds are answered before the export is gone, over whichever way
/// they came; later ones fail. Then nothing uses the disk any more.
#[test]
fn what_is_in_flight_ends_before_the_export_does() {
    for transport in transports() {
        let place = Place::new("8M");
        let server = start_slow_daemon(&place);
        let mut monitor = Qmp::connect(place.path("qmp"));
        let export = json!({
            "type": "fuse", "id": "one", "node-name": "node", "writable": true,
            "mountpoint": place.name("disk"),
            "io-uring": transport.trim_start_matches("--io-uring="),
        });
        monitor.must("block-export-add", export);
        let file = File::options().write(true).open(place.path("disk"));
        let file = file.expect("the disk");
        let all = AtomicUsize::new(0);
        let written: Vec<_> = std::thread::scope(|scope| {
            let start = |writer| {
                let (file, all) = (&file, &all);
                scope.spawn(move || write_until_it_fails(file, writer, all))
            };
            let writers: Vec<_> = (0..WRITERS).map(start).collect();
            until("writes", || all.load(Ordering::Relaxed) > 2 * WRITERS);
            monitor.must("block-export-del", json!({"id": "one"}));
            let ended = writers.into_iter().map(|writer| writer.join());
            ended.map(|ended| ended.expect("a writer")).collect()
        });
        drop(file);
        // Those that nobody had begun hear what a mount says that is gone.
        let all_gone = written.iter().all(|(_, error)| is_gone(transport, *error));
        assert!(all_gone, "{transport}: {written:?}");
        monitor.must("blockdev-del", json!({"node-name": "node"}));
        monitor.must("quit", json!({}));
        server.wait_for_end();
        place.img("check -q image");
        place.img("convert -O raw image raw");
        let raw = fs::read(place.path("raw")).expect("the raw image");
        for (writer, (blocks, _)) in written.iter().enumerate() {
            for block in 0..*blocks {
                let found = &raw[place_of(writer, block)..][..4096];
                let is_there = found == [writer as u8 + 1; 4096];
                assert!(is_there, "{transport}: block {block} of {writer}");
            }
        }
    }
}

/// A mount that is taken away while it is used, as `umount -l` does, and one whose server ends.
#[test]
fn users_of_a_mount_that_goes_hear_of_it() {
    for transport in transports() {
        for lazy in [false, true] {
            let place = Place::new("8M");
            let mut server = place.mount(&[transport]);
            let mut options = File::options();
            let file = options.read(true).write(true).open(place.path("disk"));
            let file = file.expect("the disk");
            let error = std::thread::scope(|scope| {
                let reads = || {
                    let mut bytes = [0; 4096];
                    loop {
                        if let Err(error) = file.read_exact_at(&mut bytes, 0) {
                            return error.raw_os_error();
                        }
                    }
                };
                let reader = scope.spawn(reads);
                std::thread::sleep(Duration::from_millis(50));
                if lazy {
                    // Whoever has it open keeps it.
                    place.must("umount", &["-l", &place.name("disk")]);
                    file.write_all_at(&[1; 100], 0).expect("it is still served");
                }
                server.signal("-INT");
                reader.join().expect("a reader")
            });
            assert!(is_gone(transport, error), "{transport}, {lazy}: {error:?}");
            assert_eq!(server.wait(), Some(0), "{transport}, {lazy}");
        }
    }
}

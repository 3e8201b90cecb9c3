//! A file system in the file.

use std::fs;

use crate::place::Place;

/// A loop device, which is given back.
pub struct Loop<'a> {
    place: &'a Place,
    pub device: String,
}

impl<'a> Loop<'a> {
    pub fn new(place: &'a Place) -> Loop<'a> {
        let device = place.must("losetup", &["--find", "--show", &place.name("disk")]);
        let device = device.trim().to_owned();
        Loop { place, device }
    }
}

impl Drop for Loop<'_> {
    fn drop(&mut self) {
        let _ = self.place.run("umount", &[&self.place.name("files")]);
        let _ = self.place.run("losetup", &["-d", &self.device]);
    }
}

#[test]
fn a_file_system_is_made_used_and_sound() {
    let place = Place::new("256M");
    fs::create_dir(place.path("files")).expect("a folder");
    let server = place.mount(&[]);
    let disk = place.name("disk");
    place.must("mkfs.ext4", &["-q", "-F", &disk]);
    let device = Loop::new(&place);
    let files = place.name("files");
    place.must("mount", &[&device.device, &files]);
    let file = format!("--filename={files}/data");
    let load = [
        "--name=verify",
        &file,
        "--size=64M",
        "--rw=randrw",
        "--bsrange=1k-256k",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--fsync=50",
        "--ioengine=psync",
        "--numjobs=1",
        "--randseed=5",
        "--minimal",
    ];
    place.must("fio", &load);
    fs::remove_file(place.path("files/data")).expect("a file");
    // What the journal still knows of is not trimmed.
    place.must("sync", &["--file-system", &files]);
    place.must("fstrim", &[&files]);
    fs::write(place.path("files/kept"), vec![9; 3 << 20]).expect("a file");
    place.must("umount", &[&files]);
    drop(device);
    place.must("fsck.ext4", &["-f", "-n", &disk]);
    server.end();
    place.img("check -q image");
    // The trim has given back what the load had taken.
    let taken_bytes = fs::metadata(place.path("image")).expect("the image");
    let taken_bytes = std::os::unix::fs::MetadataExt::blocks(&taken_bytes) * 512;
    assert!(taken_bytes < 60 << 20, "{taken_bytes}");

    let server = place.mount(&["--read-only"]);
    place.must("fsck.ext4", &["-f", "-n", &disk]);
    place.must("debugfs", &["-R", "stat kept", &disk]);
    server.end();
}

/// The kernel opens a read-only device for writing, and fails the writes.
#[test]
fn a_read_only_device_is_read_and_nothing_else() {
    let place = Place::new("8M");
    let vellum = env!("CARGO_BIN_EXE_vellum");
    let image = place.name("image");
    let attach = |options: &[&str]| {
        let words = [&["--find", "--show"], options, &[image.as_str()]].concat();
        let device = place.must("losetup", &words).trim().to_owned();
        Loop {
            place: &place,
            device,
        }
    };
    let read_only = attach(&["--read-only"]);
    let device = read_only.device.as_str();
    let write = ["io", "-f", "raw", "-c", "write -q 0 512", device];
    for words in [&["create", "-q", "-f", "raw", device, "64K"][..], &write] {
        let said = place.refused(vellum, words);
        assert!(
            said.contains("The device is not writable: Permission denied"),
            "{said}"
        );
    }
    for driver in ["raw", "qcow2"] {
        let node = format!("driver={driver},auto-read-only=on,file.driver=host_device");
        let node = format!("{node},file.filename={device}");
        let words = ["io", "--image-opts", "-c", "read -q 0 512", &node];
        place.must(vellum, &words);
        let words = ["io", "--image-opts", "-c", "write -q 0 512", &node];
        assert_ne!(place.run(vellum, &words).code, Some(0));
    }
    drop(read_only);
    // What was an image before is none any more.
    let device = attach(&[]);
    place.must(
        vellum,
        &["create", "-q", "-f", "raw", &device.device, "64K"],
    );
    drop(device);
    let held = fs::read(place.path("image")).expect("the image");
    assert!(held[..512] == [0; 512] && held[512..].iter().any(|&byte| byte != 0));
}

/// Direct and asynchronous requests, many at once, on the file itself.
#[test]
fn deep_queues_keep_what_was_written() {
    let place = Place::new("64M");
    let server = place.mount(&[]);
    let file = format!("--filename={}", place.name("disk"));
    for engine in ["libaio", "io_uring", "psync"] {
        let engine = format!("--ioengine={engine}");
        let load = [
            "--name=verify",
            &file,
            "--size=64M",
            "--io_size=64M",
            "--rw=randwrite",
            "--bsrange=512-128k",
            "--bs_unaligned=0",
            "--blockalign=512",
            "--direct=1",
            "--iodepth=32",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--minimal",
            &engine,
        ];
        place.must("fio", &load);
    }
    server.end();
    place.img("check -q image");
}

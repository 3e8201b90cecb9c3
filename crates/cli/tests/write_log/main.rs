//! A write log (`journal=`) as people use it: programs that are killed while it holds writes, and
//! what everybody sees afterwards.

mod place;

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use serde_json::{Value, json};
use vellum_testing::{Qmp, Running};

use place::{Place, VELLUM};

#[test]
fn what_was_flushed_survives_the_death_of_vellum_io() {
    for (options, log) in [
        ("journal=on", Some("disk.qcow2.vlog")),
        ("journal=./a.log,journal-size=128k", Some("a.log")),
        (
            "journal=on,cache.direct=on,journal-size=1M",
            Some("disk.qcow2.vlog"),
        ),
        ("journal=inside,cache.direct=on,journal-size=1M", None),
    ] {
        let place = Place::new();
        let blocks = [(0, 7), (5000, 8), (1, 9)];
        place.until_live(|| place.kill_io(options, &blocks));
        match log {
            Some(log) => assert!(place.has(log)),
            None => place.expect_one_file(),
        }
        place.expect_recovery(&blocks);
    }
}

/// It is told of, and its clusters are nobody's afterwards.
#[test]
fn a_log_inside_comes_and_goes() {
    let place = Place::new();
    place.until_live(|| place.kill_io("journal=inside", &[(0, 7)]));
    let told = place.vellum("info disk.qcow2").out;
    assert!(told.contains("write log: inside (holds writes"), "{told}");
    let checked = place.vellum("check disk.qcow2").out;
    assert!(checked.contains("No errors were found"), "{checked}");
    let audit = place.run("vellum", "audit disk.qcow2").out;
    assert!(
        audit.contains("the write log in it holds writes"),
        "{audit}"
    );
    place.vellum("check -r log disk.qcow2");
    place.expect_blocks(&["-r", "disk.qcow2"], &[(0, 7)]);
    place.img("check disk.qcow2");
    let image = "driver=qcow2,file.filename=disk.qcow2,journal=inside";
    let writes = ["write -q -P 8 1M 4k".into(), "flush".into()];
    let ran = place.io(&["--image-opts", image], &writes);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    place.expect_one_file();
    place.expect_no_trace(&[(0, 7), (256, 8)]);
    place.img("check disk.qcow2");
    // What the log holds may be given up as well.
    place.until_live(|| place.kill_io("journal=inside", &[(300, 9)]));
    place.vellum("check -r drop-log disk.qcow2");
    place.vellum("check -r leaks disk.qcow2");
    place.expect_no_trace(&[(0, 7), (256, 8)]);
    place.img("check disk.qcow2");
}

/// Whoever reads that the log is gone is told what is left to do.
#[test]
fn a_damaged_log_inside_is_told_of() {
    let place = Place::new();
    place.until_live(|| place.kill_io("journal=inside", &[(0, 7)]));
    let path = place.path("disk.qcow2");
    let whole = std::fs::read(&path).expect("an image");
    // The log was the last to be made.
    let start = whole.len() - (64 << 20);
    std::fs::write(&path, &whole[..start]).expect("room");
    let told = place
        .io(&["-r", "disk.qcow2"], &["read -q 0 4k".into()])
        .err;
    assert!(told.contains("vellum check -r drop-log"), "{told}");
    assert!(!told.contains("journal="), "{told}");
    std::fs::write(&path, &whole[..start + (1 << 20)]).expect("room");
    let told = place
        .io(&["-r", "disk.qcow2"], &["read -q 0 4k".into()])
        .err;
    assert!(told.contains("the file was cut"), "{told}");
    assert!(told.contains("vellum check -r drop-log"), "{told}");
    let mut unnamed = whole;
    let name = unnamed.windows(4).position(|bytes| bytes == b"VLLJ");
    unnamed[name.expect("an extension")] ^= 1;
    std::fs::write(&path, unnamed).expect("room");
    // Its clusters are leaks then.
    let told = place.run("vellum", "check -q -r drop-log disk.qcow2");
    let told = told.err;
    let given_up = "the writes in a write log that the image does not name were given up";
    assert!(told.contains(given_up), "{told}");
}

/// What lies in the log lies nowhere in the image.
#[test]
fn a_map_tells_of_the_log() {
    let place = Place::new();
    place.until_live(|| place.kill_io("journal=on", &[(0, 7)]));
    let told = place.run("vellum", "map disk.qcow2");
    assert_eq!(told.code, Some(1), "{told:?}");
    assert!(told.err.contains("vellum check -r log"), "{told:?}");
    place.vellum("check -r log disk.qcow2");
    place.vellum("map disk.qcow2");
}

#[test]
fn what_was_flushed_survives_the_death_of_vellum_nbd() {
    let place = Place::new();
    let image = "driver=qcow2,file.filename=disk.qcow2,journal=on";
    let mut blocks = Vec::new();
    place.until_live(|| {
        let socket = place.name("sock");
        let words = format!("nbd -k {socket} -x disk --image-opts {image}");
        let mut server = place.command("vellum", &words);
        blocks = place.kill_server(Running::start(server.stderr(Stdio::null())));
    });
    place.expect_recovery(&blocks);
}

#[test]
fn what_was_flushed_survives_the_death_of_vellum_daemon() {
    let place = Place::new();
    let mut blocks = Vec::new();
    place.until_live(|| {
        let words = "daemon --chardev stdio,id=m --monitor chardev=m";
        let mut daemon = place.command("vellum", words);
        let daemon = daemon.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut daemon = Running::start(daemon);
        let mut monitor = Qmp::of_child(&mut daemon.child);
        monitor.try_greet().expect("a greeting");
        for (execute, arguments) in [
            (
                "blockdev-add",
                json!({
                    "driver": "qcow2", "node-name": "disk", "journal": true, "journal-size": 1048576,
                    "file": {"driver": "file", "filename": "disk.qcow2"},
                }),
            ),
            (
                "nbd-server-start",
                json!({"addr": {"type": "unix", "data": {"path": "sock"}}}),
            ),
            (
                "block-export-add",
                json!({"type": "nbd", "id": "e", "node-name": "disk", "writable": true}),
            ),
        ] {
            monitor.must(execute, arguments);
        }
        blocks = place.kill_server(daemon);
    });
    assert!(place.has("disk.qcow2.vlog"));
    place.expect_recovery(&blocks);
}

#[test]
fn commands_that_end_well_leave_an_image_without_a_log() {
    let place = Place::new();
    let image = "driver=qcow2,file.filename=disk.qcow2,journal=on,journal-size=1M";
    let ran = place.io(
        &["--image-opts", image],
        &["write -q -P 7 0 4k".into(), "flush".into()],
    );
    assert_eq!(ran.code, Some(0), "{ran:?}");
    place.expect_no_trace(&[(0, 7)]);
    let words = [
        "img",
        "bench",
        "-w",
        "-c",
        "200",
        "--depth=4",
        "--flush-interval=20",
        "--image-opts",
        image,
    ];
    place.vellum(&words);
    place.expect_no_trace(&[]);
    let dump = place.img("info disk.qcow2");
    assert_eq!(place.vellum("info disk.qcow2").out, dump);
    // One image after another may use the same log.
    place.vellum("create -q -f qcow2 other.qcow2 64M");
    let other = "driver=qcow2,file.filename=other.qcow2,journal=disk.qcow2.vlog";
    let ran = place.io(
        &["--image-opts", other],
        &["write -q 0 4k".into(), "flush".into()],
    );
    assert_eq!(ran.code, Some(0), "{ran:?}");
}

#[test]
fn info_check_and_audit_tell_of_the_log() {
    let place = Place::new();
    place.until_live(|| place.kill_io("journal=on", &[(0, 7)]));
    let line = "write log: disk.qcow2.vlog (holds writes that are not in the image yet; any open for \
                writing by Vellum brings them back)\n";
    let told = place.vellum("info disk.qcow2").out;
    assert!(told.contains(line), "{told}");
    let told = place.vellum("info --output=json disk.qcow2").out;
    let told: Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!(
        told["format-specific"]["data"]["write-log"],
        "disk.qcow2.vlog"
    );
    let told = place.run("vellum", "audit disk.qcow2");
    assert_eq!(told.code, Some(2), "{told:?}");
    assert!(
        told.out
            .contains("the image names the write log 'disk.qcow2.vlog'"),
        "{told:?}"
    );
    let told = place.run("vellum", "check disk.qcow2");
    let advice = "The write log 'disk.qcow2.vlog' holds writes that are not in the image yet.\nTo bring \
                  them back: vellum check -r log disk.qcow2\n";
    assert!(told.out.ends_with(advice), "{told:?}");
    assert!(place.has_live_log(), "a look changes nothing");
    let told = place.vellum("check -r log disk.qcow2");
    assert_eq!(
        told.err,
        "disk.qcow2: 1 write was brought back from the write log\n"
    );
    assert!(
        told.out.starts_with("No errors were found on the image.\n"),
        "{told:?}"
    );
    place.expect_no_trace(&[(0, 7)]);
    let told = place.vellum("check -r log disk.qcow2");
    let nothing = "No write log holds writes for this image: there is nothing to do.\n";
    assert_eq!((&*told.out, &*told.err), (nothing, ""));
}

#[test]
fn a_repair_begins_with_the_log() {
    for fix in ["leaks", "all"] {
        let place = Place::new();
        place.until_live(|| place.kill_io("journal=on", &[(0, 7), (3000, 9)]));
        let told = place.run("vellum", &["check", "-r", fix, "disk.qcow2"]);
        assert_eq!(told.code, Some(0), "{told:?}");
        assert!(
            told.err.contains("brought back from the write log"),
            "{told:?}"
        );
        place.expect_no_trace(&[(0, 7), (3000, 9)]);
    }
}

/// Killed while it brings writes back into an image with lazy refcounts, it leaves the mark which says that the
/// refcounts are to be counted again.
#[test]
fn a_second_check_of_the_log_ends_what_a_killed_one_has_begun() {
    let place = Place::new();
    let words = ["create", "-q", "-f", "qcow2", "-o", "lazy_refcounts=on"];
    place.vellum(&[&words[..], &["disk.qcow2", "64M"]].concat());
    place.vellum("io -c 'write -q -P 7 0 4k' disk.qcow2");
    let path = place.path("disk.qcow2");
    let mut image = std::fs::read(&path).expect("an image");
    let data = image.len() / 65536 - 1;
    // The last byte of the incompatible features has the mark; a refcount is missing.
    image[79] |= 1;
    image[131_072 + 2 * data..][..2].fill(0);
    std::fs::write(&path, image).expect("written");
    let told = place.vellum("check -r log disk.qcow2");
    assert!(told.out.starts_with("No errors were found"), "{told:?}");
    let image = std::fs::read(&path).expect("an image");
    assert_eq!(image[79] & 1, 0);
    place.expect_no_trace(&[(0, 7)]);
    let told = place.vellum("check -r log disk.qcow2");
    assert!(told.out.contains("there is nothing to do"), "{told:?}");
}

#[test]
fn an_image_that_is_marked_as_damaged_is_repaired_before_its_log_comes_back() {
    let place = Place::new();
    place.until_live(|| place.kill_io("journal=on", &[(0, 7), (3000, 9)]));
    let path = place.path("disk.qcow2");
    let mut image = std::fs::read(&path).expect("an image");
    // The last byte of the incompatible features has the mark; a refcount makes it true.
    image[79] |= 2;
    image[131_072..131_074].fill(0);
    std::fs::write(&path, image).expect("written");
    let told = place.run("vellum", "check -r log disk.qcow2");
    assert!(told.err.contains("Image is corrupt"), "{told:?}");
    let told = place.vellum("check -r all disk.qcow2");
    assert!(
        told.err.contains("brought back from the write log"),
        "{told:?}"
    );
    place.expect_no_trace(&[(0, 7), (3000, 9)]);
}

#[test]
fn an_overlay_gets_its_writes_back_over_its_backing_file() {
    let place = Place::new();
    place.vellum("create -q -f qcow2 base.qcow2 64M");
    place.vellum("io -c 'write -q -P 3 0 64k' base.qcow2");
    std::fs::copy(place.path("base.qcow2"), place.path("moved.qcow2")).unwrap();
    let overlay = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        "base.qcow2",
        "-F",
        "qcow2",
        "disk.qcow2",
    ];
    place.vellum(&overlay);
    place.until_live(|| place.kill_io("journal=on", &[(1, 7)]));
    let blocks = [(0, 3), (1, 7), (2, 3), (15, 3), (16, 0)];
    place.expect_blocks(&["-r", "disk.qcow2"], &blocks);
    // A copy sees what a reader sees.
    place.vellum("convert -O qcow2 disk.qcow2 copy.qcow2");
    place.expect_blocks(&["-r", "copy.qcow2"], &blocks);
    place.vellum("compare disk.qcow2 copy.qcow2");
    // Without its backing file nothing can come back.
    let none = "driver=qcow2,file.filename=disk.qcow2,backing=";
    let told = place.io(&["--image-opts", none], &["read 0 1".into()]);
    assert!(told.err.contains("without its backing file"), "{told:?}");
    place.vellum("rebase -u -b moved.qcow2 -F qcow2 disk.qcow2");
    place.expect_no_trace(&blocks);
}

#[test]
fn a_log_that_is_gone_or_somebody_elses_is_refused() {
    let place = Place::new();
    place.until_live(|| place.kill_io("journal=on", &[(0, 7)]));
    let at = |name: &str| place.path(name);
    std::fs::rename(at("disk.qcow2.vlog"), at("moved.vlog")).unwrap();
    let refusal = |words: &[&str]| {
        let ran = place.io(words, &["read -q 0 1".into()]);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        ran.err
    };
    let gone = "the image's last writes are in its write log, which cannot be opened";
    assert!(refusal(&["disk.qcow2"]).contains(gone));
    assert!(refusal(&["-r", "disk.qcow2"]).contains(gone));
    place.vellum("info disk.qcow2");
    let opts = |rest: &str| format!("driver=qcow2,file.filename=disk.qcow2,{rest}");
    let told = refusal(&["--image-opts", &opts("journal=new.vlog")]);
    assert!(told.contains("journal= names another file"), "{told}");
    assert!(!place.has("new.vlog"), "what was made for nothing goes");
    // Another image may not have it, nor take a file that holds something else.
    place.vellum("create -q -f qcow2 other.qcow2 64M");
    let other = "driver=qcow2,file.filename=other.qcow2,journal=";
    let told = refusal(&["--image-opts", &format!("{other}moved.vlog")]);
    assert!(told.contains("the write log of another image"), "{told}");
    std::fs::write(at("text"), "hello").unwrap();
    let told = refusal(&["--image-opts", &format!("{other}text")]);
    assert!(told.contains("something else than a write log"), "{told}");
    assert_eq!(std::fs::read(at("text")).unwrap(), b"hello");
    // The right file, wherever it is.
    let moved = opts("journal=moved.vlog");
    place.expect_blocks(&["-r", "--image-opts", &moved], &[(0, 7)]);
    place.vellum(&["check", "-r", "log", "--image-opts", &moved]);
    place.expect_no_trace(&[(0, 7)]);
}

#[test]
fn another_log_takes_over_from_one_that_holds_writes() {
    let place = Place::new();
    place.until_live(|| place.kill_io("journal=on", &[(0, 7)]));
    let other = "driver=qcow2,file.filename=disk.qcow2,journal=other.vlog,journal-size=1M";
    place.expect_blocks(&["--image-opts", other], &[(0, 7)]);
    assert!(place.has("other.vlog"));
    place.expect_no_trace(&[(0, 7)]);
    // The first one can be used again.
    let first = "driver=qcow2,file.filename=disk.qcow2,journal=on";
    place.expect_blocks(&["--image-opts", first], &[(0, 7)]);
}

/// A program is killed when its log holds nothing. The image names it, and gets another log then.
#[test]
fn a_log_that_holds_nothing_can_be_used_again_after_another_one() {
    for other in ["inside", "other.vlog"] {
        let place = Place::new();
        place.kill_io("journal=on,journal-size=1M", &[]);
        assert!(place.has("disk.qcow2.vlog") && !place.has_live_log());
        for journal in [other, "on", other] {
            let image =
                format!("driver=qcow2,file.filename=disk.qcow2,journal={journal},journal-size=1M");
            place.expect_blocks(&["--image-opts", &image], &[(0, 0)]);
            place.expect_no_trace(&[]);
        }
    }
}

/// To open a pipe would wait for its other end.
#[test]
fn a_pipe_is_no_log() {
    let place = Place::new();
    place.until_live(|| place.kill_io("journal=on", &[(0, 7)]));
    let log = place.path("disk.qcow2.vlog");
    std::fs::remove_file(&log).unwrap();
    place.must("mkfifo", "disk.qcow2.vlog");
    for words in [
        &["io", "-r", "-c", "read 0 1", "disk.qcow2"][..],
        &["check", "-r", "log", "disk.qcow2"],
        &["convert", "-O", "raw", "disk.qcow2", "copy"],
    ] {
        let ran = place.run("vellum", words);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        let told = "neither a regular file nor a block device";
        assert!(ran.err.contains(told), "{ran:?}");
    }
}

#[test]
fn a_log_gets_shorter_and_longer() {
    let place = Place::new();
    for (block, kib) in [(0, 1024), (100, 128), (200, 2048)] {
        let log = format!("journal=on,journal-size={kib}k");
        place.until_live(|| place.kill_io(&log, &[(block, 7)]));
        let image = format!("driver=qcow2,file.filename=disk.qcow2,{log}");
        place.expect_blocks(&["--image-opts", &image], &[(block, 7)]);
        let log = std::fs::metadata(place.path("disk.qcow2.vlog"));
        assert_eq!(log.unwrap().len(), kib << 10);
    }
}

#[test]
fn what_a_lost_log_held_can_be_given_up() {
    let place = Place::new();
    place.vellum("io -c 'write -q -P 5 0 64k' disk.qcow2");
    place.until_live(|| place.kill_io("journal=on", &[(100, 7), (101, 7)]));
    std::fs::remove_file(place.path("disk.qcow2.vlog")).unwrap();
    let told = place.run("vellum", "check -r all disk.qcow2");
    assert_eq!(told.code, Some(1), "{told:?}");
    let advice = "vellum check -r drop-log";
    assert!(told.err.contains(advice), "{told:?}");
    let told = place.vellum("check -r drop-log disk.qcow2");
    let given_up = "the writes in the write log 'disk.qcow2.vlog' were given up";
    assert!(told.err.contains(given_up), "{told:?}");
    assert!(told.out.starts_with("No errors were found"), "{told:?}");
    assert!(!place.has_live_log());
    let ran = place.io(&["disk.qcow2"], &["read -q -P 5 0 64k".into()]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    place.vellum("check disk.qcow2");
    let told = place.vellum("check -r drop-log disk.qcow2");
    assert!(told.out.contains("there is nothing to do"), "{told:?}");
}

#[test]
fn a_log_is_locked_as_an_image_is() {
    let place = Place::new();
    place.vellum("create -q -f qcow2 other.qcow2 64M");
    let first = "driver=qcow2,file.filename=disk.qcow2,journal=log";
    let mut holder = place.command(VELLUM, &["io", "--image-opts", first]);
    let mut holder = holder
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = holder.stdin.take().unwrap();
    writeln!(input, "read 0 1").unwrap();
    let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.is_ok_and(|line| line.contains("read 1/1"))));
    let second = "driver=qcow2,file.filename=other.qcow2,journal=log";
    let told = place.io(&["--image-opts", second], &["read 0 1".into()]);
    assert!(
        told.err.contains("Failed to get \"write\" lock"),
        "{told:?}"
    );
    drop(input);
    assert!(holder.wait().unwrap().success());
    let told = place.io(&["--image-opts", second], &["read 0 1".into()]);
    assert_eq!(told.code, Some(0), "{told:?}");
}

#[test]
fn only_images_that_can_have_a_log_take_one() {
    let place = Place::new();
    let told = |options: &str| {
        place
            .io(&["--image-opts", options], &["read -q 0 1".into()])
            .err
    };
    let raw = told("driver=raw,file.filename=disk.qcow2,journal=on");
    assert!(
        raw.contains("Block format 'raw' does not support the option 'journal'"),
        "{raw}"
    );
    let no_file =
        told("driver=qcow2,file.driver=blkdebug,file.image.filename=disk.qcow2,journal=on");
    assert!(
        no_file.contains("journal=on needs an image in a local file"),
        "{no_file}"
    );
    let size = told("driver=qcow2,file.filename=disk.qcow2,journal=on,journal-size=1000");
    assert!(
        size.contains("the size of the write log must be a multiple of 4096"),
        "{size}"
    );
    let size = told("driver=qcow2,file.filename=disk.qcow2,journal-size=1M");
    assert!(size.contains("'journal-size' needs 'journal'"), "{size}");
    // Who only reads writes no log.
    let reader = [
        "-r",
        "--image-opts",
        "driver=qcow2,file.filename=disk.qcow2,journal=on",
    ];
    place.expect_blocks(&reader, &[(0, 0)]);
    assert!(!place.has("disk.qcow2.vlog"));
}

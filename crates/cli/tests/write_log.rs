//! A write log (`journal=`) as people use it: programs that are killed while it holds writes, and
//! what everybody sees afterwards.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");
const BLOCK_BYTES: u64 = 4096;
/// A log is ended when nothing is flushed for a second, so a machine that stands still for
/// so long leaves none to find.
const ATTEMPTS: usize = 10;

struct Place(TempDir);

/// What a program printed and how it ended.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ran {
    fn of(output: &Output) -> Ran {
        Ran {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir().expect("a folder"));
        place.vellum(&["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"]);
        place
    }

    fn has(&self, name: &str) -> bool {
        self.0.path().join(name).exists()
    }

    fn command(&self, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.0.path()).args(words);
        command
    }

    fn run(&self, program: &str, words: &[&str]) -> Ran {
        let output = self.command(program, words).output();
        let output =
            output.unwrap_or_else(|error| panic!("{program}: {error}; `cargo xtask setup`"));
        Ran::of(&output)
    }

    fn must(&self, program: &str, words: &[&str]) -> Ran {
        let ran = self.run(program, words);
        assert_eq!(ran.code, Some(0), "{program} {words:?}: {ran:?}");
        ran
    }

    fn vellum(&self, words: &[&str]) -> Ran {
        self.must(VELLUM, words)
    }

    /// Runs commands of `vellum io`.
    fn io(&self, words: &[&str], commands: &[String]) -> Ran {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let words = ["io"]
            .into_iter()
            .chain(commands)
            .chain(words.iter().copied());
        self.run(VELLUM, &words.collect::<Vec<_>>())
    }

    /// Whether the image needs its log, as a program that does not know it is told.
    fn has_live_log(&self) -> bool {
        let told = self.run("qemu-img", &["info", "disk.qcow2"]);
        match told.code {
            Some(0) => false,
            _ => {
                let refusal = "Unsupported qcow2 feature(s): Vellum's write log";
                assert!(told.err.contains(refusal), "{told:?}");
                true
            }
        }
    }

    /// Expects the blocks in the image, byte by byte, for `vellum io` and these words.
    #[track_caller]
    fn expect_blocks(&self, words: &[&str], blocks: &[(u64, u8)]) {
        let reads = blocks.iter().map(|(block, byte)| {
            let offset = block * BLOCK_BYTES;
            format!("read -q -P {byte} {offset} {BLOCK_BYTES}")
        });
        let reads: Vec<String> = reads.collect();
        let ran = self.io(words, &reads);
        assert_eq!((ran.code, &*ran.out), (Some(0), ""), "{ran:?}");
    }

    /// Expects everybody to find the blocks in an image whose log holds some.
    #[track_caller]
    fn expect_recovery(&self, blocks: &[(u64, u8)]) {
        assert!(self.has_live_log());
        self.expect_blocks(&["-r", "disk.qcow2"], blocks);
        assert!(self.has_live_log(), "reading changes nothing");
        self.expect_blocks(&["disk.qcow2"], blocks);
        self.expect_no_trace(blocks);
    }

    /// Expects an image that QEMU's tools take for one of theirs, with these blocks.
    #[track_caller]
    fn expect_no_trace(&self, blocks: &[(u64, u8)]) {
        assert!(!self.has_live_log());
        // Clusters may be lost: space that was counted for writes which did not come.
        let checked = self.run("qemu-img", &["check", "disk.qcow2"]);
        assert!(matches!(checked.code, Some(0 | 3)), "{checked:?}");
        for (block, byte) in blocks {
            let read = format!("read -P {byte} {} {BLOCK_BYTES}", block * BLOCK_BYTES);
            let ran = self.must("qemu-io", &["-r", "-c", &read, "disk.qcow2"]);
            assert!(!ran.out.contains("failed"), "{ran:?}");
        }
    }

    /// Kills `vellum io` after each of the blocks was written and flushed.
    fn kill_io(&self, options: &str, blocks: &[(u64, u8)]) {
        let options = format!("driver=qcow2,file.filename=disk.qcow2,{options}");
        let mut io = self.command(VELLUM, &["io", "--image-opts", &options]);
        let mut io = io
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it runs");
        let mut input = io.stdin.take().expect("a pipe");
        for (block, byte) in blocks {
            let offset = block * BLOCK_BYTES;
            writeln!(input, "write -q -P {byte} {offset} {BLOCK_BYTES}\nflush").expect("a pipe");
        }
        writeln!(input, "read 0 1").expect("a pipe");
        let mut lines = BufReader::new(io.stdout.take().expect("a pipe")).lines();
        let read = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("read 1/1")));
        assert!(read.is_some(), "it does not answer");
        io.kill().expect("killed");
        io.wait().expect("ended");
    }

    /// Does something until it leaves an image whose log holds writes.
    #[track_caller]
    fn until_live(&self, mut crash: impl FnMut()) {
        let path = |name: &str| self.0.path().join(name);
        let before = std::fs::read(path("disk.qcow2")).expect("an image");
        let lives = (0..ATTEMPTS).any(|attempt| {
            if attempt > 0 {
                // What is in its place already needs no log.
                std::fs::write(path("disk.qcow2"), &before).expect("written");
                for log in ["disk.qcow2.vlog", "a.log"] {
                    drop(std::fs::remove_file(path(log)));
                }
            }
            crash();
            self.has_live_log()
        });
        assert!(lives, "no log holds anything");
    }

    /// A client that writes and flushes through a socket; the server is killed in the middle.
    /// The blocks that a flush made durable.
    fn kill_server(&self, mut server: Child) -> Vec<(u64, u8)> {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !self.has("sock") {
            assert!(Instant::now() < deadline, "no socket in time");
            std::thread::sleep(Duration::from_millis(5));
        }
        let blocks: Vec<(u64, u8)> = (0..400).map(|n| (n * 7919 % 16384, n as u8 | 1)).collect();
        let mut client = self.command("qemu-io", &["-f", "raw"]);
        for (block, byte) in &blocks {
            let write = format!("write -P {byte} {} {BLOCK_BYTES}", block * BLOCK_BYTES);
            client.args(["-c", &write, "-c", "flush"]);
        }
        client.arg("nbd+unix:///disk?socket=sock");
        let mut client = client
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it runs");
        let lines = BufReader::new(client.stdout.take().expect("a pipe")).lines();
        let mut written = 0;
        for line in lines {
            written += usize::from(line.expect("text").starts_with("wrote 4096/4096"));
            if written == 100 {
                server.kill().expect("killed");
            }
        }
        server.wait().expect("ended");
        client.wait().expect("ended");
        std::fs::remove_file(self.0.path().join("sock")).expect("left behind");
        assert!((100..400).contains(&written), "{written} writes");
        // The last one that was told may not have been flushed.
        blocks[..written - 1].to_vec()
    }
}

#[test]
fn what_was_flushed_survives_the_death_of_vellum_io() {
    for (options, log) in [
        ("journal=on", "disk.qcow2.vlog"),
        ("journal=./a.log,journal-size=128k", "a.log"),
        (
            "journal=on,cache.direct=on,journal-size=1M",
            "disk.qcow2.vlog",
        ),
    ] {
        let place = Place::new();
        let blocks = [(0, 7), (5000, 8), (1, 9)];
        place.until_live(|| place.kill_io(options, &blocks));
        assert!(place.has(log));
        place.expect_recovery(&blocks);
    }
}

#[test]
fn what_was_flushed_survives_the_death_of_vellum_nbd() {
    let place = Place::new();
    let image = "driver=qcow2,file.filename=disk.qcow2,journal=on";
    let mut blocks = Vec::new();
    place.until_live(|| {
        let socket = place.0.path().join("sock").display().to_string();
        let words = ["nbd", "-k", &socket, "-x", "disk", "--image-opts", image];
        let server = place.command(VELLUM, &words).stderr(Stdio::null()).spawn();
        blocks = place.kill_server(server.expect("it runs"));
    });
    place.expect_recovery(&blocks);
}

#[test]
fn what_was_flushed_survives_the_death_of_vellum_daemon() {
    let place = Place::new();
    let mut blocks = Vec::new();
    place.until_live(|| {
        let words = ["daemon", "--chardev", "stdio,id=m", "--monitor", "chardev=m"];
        let mut daemon = place.command(VELLUM, &words);
        let daemon = daemon.stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        let mut daemon = daemon.expect("it runs");
        let mut input = daemon.stdin.take().expect("a pipe");
        for (execute, arguments) in [
            ("qmp_capabilities", json!({})),
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
            let request = json!({"execute": execute, "arguments": arguments});
            writeln!(input, "{request}").expect("a pipe");
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
    let dump = place.must("qemu-img", &["info", "disk.qcow2"]).out;
    assert_eq!(place.vellum(&["info", "disk.qcow2"]).out, dump);
    // One image after another may use the same log.
    place.vellum(&["create", "-q", "-f", "qcow2", "other.qcow2", "64M"]);
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
    let told = place.vellum(&["info", "disk.qcow2"]).out;
    assert!(told.contains(line), "{told}");
    let told = place.vellum(&["info", "--output=json", "disk.qcow2"]).out;
    let told: Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!(
        told["format-specific"]["data"]["write-log"],
        "disk.qcow2.vlog"
    );
    let told = place.run(VELLUM, &["audit", "disk.qcow2"]);
    assert_eq!(told.code, Some(2), "{told:?}");
    assert!(
        told.out
            .contains("the image names the write log 'disk.qcow2.vlog'"),
        "{told:?}"
    );
    let told = place.run(VELLUM, &["check", "disk.qcow2"]);
    let advice = "The write log 'disk.qcow2.vlog' holds writes that are not in the image yet.\nTo bring \
                  them back: vellum check -r log disk.qcow2\n";
    assert!(told.out.ends_with(advice), "{told:?}");
    assert!(place.has_live_log(), "a look changes nothing");
    let told = place.vellum(&["check", "-r", "log", "disk.qcow2"]);
    assert_eq!(
        told.err,
        "disk.qcow2: 1 write was brought back from the write log\n"
    );
    assert!(
        told.out.starts_with("No errors were found on the image.\n"),
        "{told:?}"
    );
    place.expect_no_trace(&[(0, 7)]);
    let told = place.vellum(&["check", "-r", "log", "disk.qcow2"]);
    let nothing = "No write log holds writes for this image: there is nothing to do.\n";
    assert_eq!((&*told.out, &*told.err), (nothing, ""));
}

#[test]
fn a_repair_begins_with_the_log() {
    for fix in ["leaks", "all"] {
        let place = Place::new();
        place.until_live(|| place.kill_io("journal=on", &[(0, 7), (3000, 9)]));
        let told = place.run(VELLUM, &["check", "-r", fix, "disk.qcow2"]);
        assert_eq!(told.code, Some(0), "{told:?}");
        assert!(
            told.err.contains("brought back from the write log"),
            "{told:?}"
        );
        place.expect_no_trace(&[(0, 7), (3000, 9)]);
    }
}

#[test]
fn an_image_that_is_marked_as_damaged_is_repaired_before_its_log_comes_back() {
    let place = Place::new();
    place.until_live(|| place.kill_io("journal=on", &[(0, 7), (3000, 9)]));
    let path = place.0.path().join("disk.qcow2");
    let mut image = std::fs::read(&path).expect("an image");
    // The last byte of the incompatible features has the mark; a refcount makes it true.
    image[79] |= 2;
    image[131_072..131_074].fill(0);
    std::fs::write(&path, image).expect("written");
    let told = place.run(VELLUM, &["check", "-r", "log", "disk.qcow2"]);
    assert!(told.err.contains("Image is corrupt"), "{told:?}");
    let told = place.vellum(&["check", "-r", "all", "disk.qcow2"]);
    assert!(
        told.err.contains("brought back from the write log"),
        "{told:?}"
    );
    place.expect_no_trace(&[(0, 7), (3000, 9)]);
}

#[test]
fn an_overlay_gets_its_writes_back_over_its_backing_file() {
    let place = Place::new();
    place.vellum(&["create", "-q", "-f", "qcow2", "base.qcow2", "64M"]);
    place.vellum(&["io", "-c", "write -q -P 3 0 64k", "base.qcow2"]);
    std::fs::copy(
        place.0.path().join("base.qcow2"),
        place.0.path().join("moved.qcow2"),
    )
    .unwrap();
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
    place.vellum(&["convert", "-O", "qcow2", "disk.qcow2", "copy.qcow2"]);
    place.expect_blocks(&["-r", "copy.qcow2"], &blocks);
    place.vellum(&["compare", "disk.qcow2", "copy.qcow2"]);
    // Without its backing file nothing can come back.
    let none = "driver=qcow2,file.filename=disk.qcow2,backing=";
    let told = place.io(&["--image-opts", none], &["read 0 1".into()]);
    assert!(told.err.contains("without its backing file"), "{told:?}");
    place.vellum(&[
        "rebase",
        "-u",
        "-b",
        "moved.qcow2",
        "-F",
        "qcow2",
        "disk.qcow2",
    ]);
    place.expect_no_trace(&blocks);
}

#[test]
fn a_log_that_is_gone_or_somebody_elses_is_refused() {
    let place = Place::new();
    place.until_live(|| place.kill_io("journal=on", &[(0, 7)]));
    let at = |name: &str| place.0.path().join(name);
    std::fs::rename(at("disk.qcow2.vlog"), at("moved.vlog")).unwrap();
    let refusal = |words: &[&str]| {
        let ran = place.io(words, &["read -q 0 1".into()]);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        ran.err
    };
    let gone = "the image's last writes are in its write log, which cannot be opened";
    assert!(refusal(&["disk.qcow2"]).contains(gone));
    assert!(refusal(&["-r", "disk.qcow2"]).contains(gone));
    place.vellum(&["info", "disk.qcow2"]);
    let opts = |rest: &str| format!("driver=qcow2,file.filename=disk.qcow2,{rest}");
    let told = refusal(&["--image-opts", &opts("journal=new.vlog")]);
    assert!(told.contains("journal= names another file"), "{told}");
    assert!(!place.has("new.vlog"), "what was made for nothing goes");
    // Another image may not have it, nor take a file that holds something else.
    place.vellum(&["create", "-q", "-f", "qcow2", "other.qcow2", "64M"]);
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

/// To open a pipe would wait for its other end.
#[test]
fn a_pipe_is_no_log() {
    let place = Place::new();
    place.until_live(|| place.kill_io("journal=on", &[(0, 7)]));
    let log = place.0.path().join("disk.qcow2.vlog");
    std::fs::remove_file(&log).unwrap();
    place.must("mkfifo", &["disk.qcow2.vlog"]);
    for words in [
        &["io", "-r", "-c", "read 0 1", "disk.qcow2"][..],
        &["check", "-r", "log", "disk.qcow2"],
        &["convert", "-O", "raw", "disk.qcow2", "copy"],
    ] {
        let ran = place.run(VELLUM, words);
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
        let log = std::fs::metadata(place.0.path().join("disk.qcow2.vlog"));
        assert_eq!(log.unwrap().len(), kib << 10);
    }
}

#[test]
fn what_a_lost_log_held_can_be_given_up() {
    let place = Place::new();
    place.vellum(&["io", "-c", "write -q -P 5 0 64k", "disk.qcow2"]);
    place.until_live(|| place.kill_io("journal=on", &[(100, 7), (101, 7)]));
    std::fs::remove_file(place.0.path().join("disk.qcow2.vlog")).unwrap();
    let told = place.run(VELLUM, &["check", "-r", "all", "disk.qcow2"]);
    assert_eq!(told.code, Some(1), "{told:?}");
    let advice = "vellum check -r drop-log";
    assert!(told.err.contains(advice), "{told:?}");
    let told = place.vellum(&["check", "-r", "drop-log", "disk.qcow2"]);
    let given_up = "the writes in the write log 'disk.qcow2.vlog' were given up";
    assert!(told.err.contains(given_up), "{told:?}");
    assert!(told.out.starts_with("No errors were found"), "{told:?}");
    assert!(!place.has_live_log());
    let ran = place.io(&["disk.qcow2"], &["read -q -P 5 0 64k".into()]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    place.vellum(&["check", "disk.qcow2"]);
    let told = place.vellum(&["check", "-r", "drop-log", "disk.qcow2"]);
    assert!(told.out.contains("there is nothing to do"), "{told:?}");
}

#[test]
fn a_log_is_locked_as_an_image_is() {
    let place = Place::new();
    place.vellum(&["create", "-q", "-f", "qcow2", "other.qcow2", "64M"]);
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

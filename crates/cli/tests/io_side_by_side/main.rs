//! `vellum io` beside the real `qemu-io`: the same commands on twin images must
//! print the same and end with the same code.

mod overlap;

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// One run of a tool, without what differs from run to run.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    code: Option<i32>,
    output: Vec<String>,
    errors: Vec<String>,
}

impl Answer {
    fn new(output: &Output) -> Answer {
        let lines = |bytes: &[u8]| String::from_utf8_lossy(bytes).lines().map(steady).collect();
        Answer {
            code: output.status.code(),
            output: lines(&output.stdout),
            errors: lines(&output.stderr),
        }
    }
}

/// A line without times and rates, and without the words of a summary.
fn steady(line: &str) -> String {
    if let Some((head, _)) = line.split_once(" ops; ") {
        return format!("{head} ops");
    }
    if let Some((head, _)) = line.split_once(",0:00:0") {
        return head.to_owned();
    }
    match line.split_once(" -- ") {
        Some((head, _)) if !line.contains(" option -- ") && !line.starts_with("Parsing") => {
            head.to_owned()
        }
        _ => line.to_owned(),
    }
}

/// Two folders with the same files; in `ours`, `qemu-io` is Vellum.
struct Twins {
    ours: TempDir,
    theirs: TempDir,
}

impl Twins {
    fn new() -> Twins {
        let folder = || tempfile::tempdir().expect("a temporary folder");
        let twins = Twins {
            ours: folder(),
            theirs: folder(),
        };
        let link = twins.ours.path().join("qemu-io");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_vellum"), link).expect("a link");
        twins
    }

    /// Makes an image with the real `qemu-img` in both folders.
    fn with_image(options: &[&str]) -> Twins {
        let twins = Twins::new();
        for folder in [&twins.ours, &twins.theirs] {
            let mut command = Command::new("qemu-img");
            command
                .args(["create", "-q"])
                .args(options)
                .current_dir(folder.path());
            let output = command.output().expect(MISSING);
            assert!(output.status.success(), "{output:?}");
        }
        twins
    }

    fn write_file(&self, name: &str, content: &[u8]) {
        for folder in [&self.ours, &self.theirs] {
            std::fs::write(folder.path().join(name), content).expect("a file");
        }
    }

    /// Runs both tools and compares the answers.
    fn run(&self, words: &[&str]) -> Answer {
        self.run_with_input(words, None)
    }

    fn run_with_input(&self, words: &[&str], input: Option<&str>) -> Answer {
        let link = self.ours.path().join("qemu-io");
        let ours = Answer::new(&run_tool(&link, self.ours.path(), words, input));
        let tool = Path::new("qemu-io");
        let theirs = Answer::new(&run_tool(tool, self.theirs.path(), words, input));
        assert_eq!(ours, theirs, "left: vellum, right: qemu-io, for {words:?}");
        ours
    }

    /// Runs commands, all in one process.
    fn commands(&self, image: &[&str], commands: &[&str]) -> Answer {
        let mut words: Vec<&str> = commands
            .iter()
            .flat_map(|command| ["-c", command])
            .collect();
        words.extend(image);
        self.run(&words)
    }
}

const MISSING: &str = "QEMU's programs are not installed; run `cargo xtask setup`";

fn run_tool(tool: &Path, folder: &Path, words: &[&str], input: Option<&str>) -> Output {
    let mut command = Command::new(tool);
    command.args(words).current_dir(folder);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect(MISSING);
    let mut stdin = child.stdin.take().expect("a pipe");
    // A tool that does not read its input may be gone already.
    let _ = stdin.write_all(input.unwrap_or_default().as_bytes());
    drop(stdin);
    child.wait_with_output().expect("an answer")
}

const QCOW2: &[&str] = &["-f", "qcow2", "disk", "1M"];

#[test]
fn reads_and_writes() {
    let twins = Twins::with_image(QCOW2);
    let answer = twins.commands(
        &["disk"],
        &[
            "write 0 64k",
            "write -P 0x5a 60k 8k",
            "read -P 0xcd 0 60k",
            "read -P 0x5a 60k 8k",
            "read -v 61430 20",
            "read -C 0 4k",
            "read -q 0 4k",
            "write -f 100 1",
            "write 100 0",
            "writev -P 3 128k 1k 2k 512",
            "readv -P 3 128k 3k 512",
            "readv -v 128k 10 10",
            "r 0 1",
            "w 0 1",
            "flush",
            "f",
        ],
    );
    assert_eq!(answer.code, Some(0));
}

#[test]
fn compressed_writes_are_those_of_qemu_io() {
    let twins = Twins::with_image(&["-f", "qcow2", "disk", "10M"]);
    twins.commands(
        &["disk"],
        &[
            "write -c -P 3 64k 64k",
            "write -c -P 4 192k 128k",
            "write -c -z 512k 64k",
            "write -c 0 512",
            "write -c 512 64k",
            "write -c 10M 64k",
            "write -c -C -P 5 640k 64k",
            "write -P 6 64k 100",
            "read -P 6 64k 100",
            "read -P 3 65636 65436",
            "read -P 4 192k 128k",
            "read -P 5 640k 64k",
        ],
    );
    let raw = Twins::with_image(&["-f", "raw", "disk", "1M"]);
    raw.commands(&["-f", "raw", "disk"], &["write -c 0 64k"]);
}

#[test]
fn patterns_that_do_not_match_fail() {
    let twins = Twins::with_image(QCOW2);
    let answer = twins.commands(
        &["disk"],
        &[
            "write -P 7 0 4k",
            "read -P 8 0 4k",
            "read -P 7 -s 1k -l 1k 0 8k",
            "read -P 0 -s 1k -l 1k 0 8k",
            "read -P 7 -l 4k 0 8k",
            "read -s 1k 0 4k",
            "read -P 1 -s 1k -l 4k 0 4k",
            "readv -P 8 0 1k 1k",
        ],
    );
    assert_eq!(answer.code, Some(1));
}

#[test]
fn zeroes_and_discards() {
    let twins = Twins::with_image(QCOW2);
    let answer = twins.commands(
        &["disk"],
        &[
            "write 0 256k",
            "write -z 0 64k",
            "write -z -u 64k 64k",
            "write -z -n 3 1k",
            "discard 128k 64k",
            "discard -C 192k 1k",
            "discard -q 192k 1k",
            "read -P 0 0 192k",
            "read -P 0xcd 192k 64k",
            "map",
            "alloc 0",
            "alloc 0 2M",
            "alloc 256k 128k",
            "alloc 2M",
        ],
    );
    assert_eq!(answer.code, Some(0));
}

#[test]
fn parts_of_zero_clusters_are_zeroed_in_a_raw_data_file_whatever_its_blocks() {
    let options = "data_file=disk.data,data_file_raw=on";
    let twins = Twins::with_image(&["-f", "qcow2", "-o", options, "disk", "1M"]);
    let answer = twins.commands(
        &["-t", "none", "disk"],
        &[
            "write -z 64k 64k",
            "write -z -n 65539 1k",
            "write -z -n 131075 1k",
            "write 192k 64k",
            "write -z -n 196611 1k",
            "write -z 196611 1k",
            "read -P 0 64k 128k",
            "map",
        ],
    );
    assert_eq!(answer.code, Some(1), "data cannot be zeroed in part");
}

#[test]
fn asynchronous_requests_finish() {
    let twins = Twins::with_image(QCOW2);
    let answer = twins.commands(
        &["disk"],
        &[
            "aio_write -q -P 1 0 64k",
            "aio_write -q -P 2 64k 32k 32k",
            "aio_flush",
            "aio_write -q -z 0 64k",
            "aio_flush",
            "aio_read -P 0 0 64k",
            "aio_flush",
            "aio_read -P 3 64k 64k",
            "aio_flush",
            "aio_write 128k 1k",
            "aio_flush",
            "aio_read 1M 1k",
            "aio_flush",
            "aio_write 1M 1k",
            "aio_flush",
            "aio_read -i 0 1k",
            "aio_write -i 0 1k",
        ],
    );
    assert_eq!(
        answer.code,
        Some(0),
        "failures of asynchronous requests do not count"
    );
}

#[test]
fn wrong_calls_are_answered_alike() {
    let twins = Twins::with_image(QCOW2);
    for command in [
        "foo",
        "read",
        "read 0",
        "length 3",
        "alloc",
        "map 1",
        "read 0 1x",
        "read 0 99E",
        "read 0 3G",
        "read 0 0.5",
        "read 0 0x10k",
        "read -x 0 3",
        "read -a 0 3",
        "read -P 300 0 1k",
        "read -P 0x 0 1k",
        "read -- -1 5",
        "read 1M 1k",
        "write 1M 1k",
        "discard 1M 1k",
        "discard 0 3G",
        "write -z 1M 1k",
        "write -z 0 3G",
        "write 0 3G",
        "write -n 0 1",
        "write -u 0 1",
        "write -z -P 1 0 1",
        "write -b -z 0 1",
        "write -f -b 0 1",
        "write -c 1 512",
        "write -c 0 511",
        "write -s nosuch 0 512",
        "write -s empty 0 512",
        "readv 0 1k 2G",
        "readv 0 x",
        "readv x 1",
        "readv 1M 1k",
        "writev 1M 1k",
        "aio_write -u 0 1",
        "aio_write -z 0 1 2",
        "truncate x",
        "truncate -m bad 1",
        "sleep x",
        "sigraise x",
        "sigraise 999",
        "help nosuch",
        "break a b",
        "resume a",
        "remove_break a",
        "zone_report 0 1",
        "zone_append 0 1",
        "open other",
        "reopen -r -w",
        "reopen -c bad",
    ] {
        twins.write_file("empty", b"");
        let answer = twins.commands(&["disk"], &[command]);
        assert_eq!(answer.code, Some(1), "{command}");
    }
}

#[test]
fn a_file_can_be_the_pattern() {
    let twins = Twins::with_image(QCOW2);
    twins.write_file("abc", b"abc");
    let answer = twins.commands(&["disk"], &["write -s abc 0 8", "read -v 0 10"]);
    assert_eq!(answer.code, Some(0));
}

#[test]
fn commands_need_an_open_image() {
    let twins = Twins::with_image(QCOW2);
    for commands in [
        &[
            "length",
            "open -r disk",
            "length",
            "write 0 1k",
            "close",
            "length",
        ][..],
        &["open nosuch", "length"],
        &["open"],
        &["open a b"],
        &["open -x disk"],
        &["open -o driver=qcow2 disk", "open disk", "info"],
        &["close"],
        &["help", "q", "length"],
        &[""],
    ] {
        twins.commands(&[], commands);
    }
}

#[test]
fn an_image_can_be_reopened() {
    let twins = Twins::with_image(QCOW2);
    twins.commands(
        &["disk"],
        &["reopen -r", "write 0 1k", "reopen -w", "write 0 1k"],
    );
    twins.commands(
        &["-r", "disk"],
        &["write 0 1k", "reopen -w -c none", "write 0 1k"],
    );
}

#[test]
fn info_tells_what_is_special() {
    for options in [
        QCOW2,
        &["-f", "qcow2", "-o", "compat=0.10", "disk", "1G"],
        &[
            "-f",
            "qcow2",
            "-o",
            "extended_l2=on,cluster_size=128k,refcount_bits=8",
            "disk",
            "1G",
        ],
        &[
            "-f",
            "qcow2",
            "-o",
            "lazy_refcounts=on,compression_type=zstd",
            "disk",
            "1T",
        ],
        &[
            "-f",
            "qcow2",
            "-o",
            "data_file=disk.data,data_file_raw=on",
            "disk",
            "1M",
        ],
        &["-f", "raw", "disk", "1M"],
    ] {
        let twins = Twins::with_image(options);
        let answer = twins.commands(&["-f", options[1], "disk"], &["info", "length"]);
        assert_eq!(answer.code, Some(0));
    }
}

#[test]
fn raw_images_work_too() {
    let twins = Twins::with_image(&["-f", "raw", "disk", "1M"]);
    let answer = twins.commands(
        &["-f", "raw", "disk"],
        &[
            "write 1000 10",
            "read -v 990 30",
            "write -z 0 4k",
            "discard 0 64k",
            "map",
            "length",
        ],
    );
    assert_eq!(answer.code, Some(0));
}

#[test]
fn vm_state_lies_behind_the_disk() {
    let twins = Twins::with_image(QCOW2);
    let reads = [
        "read -b -P 3 0 4k",
        "read -b -P 4 1T 64k",
        "read -b -P 0 1M 4k",
        "read -P 5 0 1M",
        "length",
    ];
    let writes = [
        "write -P 5 0 1M",
        "write -b -P 3 0 4k",
        "write -b -P 4 1T 64k",
    ];
    assert_eq!(twins.commands(&["disk"], &writes).code, Some(0));
    assert_eq!(twins.commands(&["disk"], &reads).code, Some(0));
    twins.commands(&["disk"], &["read -b 1 512", "write -b 0 700"]);
    let raw = Twins::with_image(&["-f", "raw", "disk", "1M"]);
    let image = ["-f", "raw", "disk"];
    raw.commands(&image, &["write -b 0 512", "read -b 0 512"]);
}

#[test]
fn commands_come_from_standard_input_as_well() {
    let twins = Twins::with_image(QCOW2);
    let script = "write 0 4k\nread -P 1 0 4k\n\nlength\nq\nlength\n";
    let answer = twins.run_with_input(&["disk"], Some(script));
    assert_eq!(answer.code, Some(1));
    assert!(
        answer
            .output
            .iter()
            .any(|line| line.starts_with("qemu-io> "))
    );
    twins.run_with_input(&["disk"], Some("length"));
    twins.run_with_input(&[], None);
}

#[test]
fn the_command_line_is_qemu_ios() {
    let twins = Twins::with_image(QCOW2);
    for words in [
        &["nosuch"][..],
        &["-f", "nosuch", "disk"],
        &["-t", "bad", "disk"],
        &["-d", "bad", "disk"],
        &["-i", "bad", "disk"],
        &["-r", "-c", "write 0 1k", "disk"],
        &["-r", "-c", "discard 0 64k", "disk"],
        &["-n", "-c", "length", "disk"],
        &["-m", "-c", "write 0 3k", "-c", "read -P 0xcd 0 3k", "disk"],
        &["-i", "threads", "-c", "write 0 3k", "disk"],
        &[
            "-d",
            "ignore",
            "-c",
            "write 0 64k",
            "-c",
            "discard 0 64k",
            "-c",
            "map",
            "disk",
        ],
        &[
            "--image-opts",
            "-c",
            "length",
            "driver=qcow2,file.filename=disk",
        ],
        &[
            "--image-opts",
            "-f",
            "qcow2",
            "-c",
            "length",
            "driver=qcow2,file.filename=disk",
        ],
        &["--cmd=length", "--force-share", "--read-only", "disk"],
    ] {
        twins.run(words);
    }
}

#[test]
fn a_signal_ends_the_program() {
    let twins = Twins::with_image(QCOW2);
    let answer = twins.commands(&["disk"], &["sigraise 15", "length"]);
    assert_eq!(answer.code, None);
}

#[test]
fn cache_options_are_taken_and_refused_as_in_qemu() {
    let twins = Twins::with_image(QCOW2);
    for options in [
        "l2-cache-size=1M,refcount-cache-size=1M,cache-size=2M",
        "l2-cache-size=2M,cache-size=1M",
        "refcount-cache-size=2M,cache-size=1M",
        "refcount-cache-size=1M,cache-size=1M",
        "cache-size=1E,l2-cache-size=1k",
        "refcount-cache-size=1E",
        "l2-cache-size=1E",
        "l2-cache-size=0",
        "l2-cache-size=-1",
        "l2-cache-size=1x",
        "cache-size=0",
        "cache-size=1.5M",
        "cache-size=99999999T",
        "l2-cache-entry-size=256",
        "l2-cache-entry-size=512",
        "l2-cache-entry-size=3000",
        "l2-cache-entry-size=64k",
        "l2-cache-entry-size=128K",
        "cache-clean-interval=4294967295",
        "cache-clean-interval=4294967296",
        "cache-clean-interval=-1",
        "cache-clean-interval=1k",
    ] {
        let image = format!("driver=qcow2,file.filename=disk,{options}");
        twins.commands(&["--image-opts", &image], &["read 0 4k"]);
        let open = format!("open -o {options} disk");
        twins.commands(&[], &[&open, "read 0 4k"]);
    }
}

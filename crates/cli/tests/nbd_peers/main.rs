//! `vellum nbd` with real clients: what they read, write and are told must be
//! right, and its command line must behave as that of `qemu-nbd`.

mod guessed;
mod sockets;

use std::fs;
use std::ops::Deref;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use vellum_testing::{Folder, Running, Said, until};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

const SIZE_BYTES: usize = 8 << 20;

/// A folder with an image, and a pattern in it.
struct Place(Folder);

impl Deref for Place {
    type Target = Folder;

    fn deref(&self) -> &Folder {
        &self.0
    }
}

impl Place {
    fn new() -> Self {
        let place = Place(Folder::new(VELLUM));
        place.write("disk.raw", pattern());
        place.img("convert -f raw -O qcow2 disk.raw disk.qcow2");
        place
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.name("socket"))
    }

    fn server(&self) -> Command {
        self.command("our qemu-nbd", "")
    }

    /// Serves an image on the socket, ready for clients.
    fn serve(&self, words: &[&str]) -> Running {
        let mut command = self.server();
        command.arg("-k").arg(self.path("socket")).args(words);
        let mut served = Running::start(command.stderr(Stdio::null()));
        until("a socket", || {
            assert!(!served.has_ended(), "{words:?}");
            self.has("socket")
        });
        served
    }

    /// What the program answers to a command line that it refuses.
    fn refusal(&self, words: &[&str]) -> String {
        self.refused("our qemu-nbd", words)
    }
}

/// Data, a hole in the middle, data again.
fn pattern() -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..SIZE_BYTES)
        .map(|at| (at / 4096 + at % 251) as u8 | 1)
        .collect();
    bytes[2 << 20..5 << 20].fill(0);
    bytes
}

#[test]
fn nbdinfo_and_qemu_see_the_same_export_as_of_qemu_nbd() {
    let place = Place::new();
    for words in [
        &["-t", "-f", "qcow2", "disk.qcow2"][..],
        &[
            "-t",
            "-r",
            "-A",
            "-e",
            "5",
            "-D",
            "a disk",
            "-x",
            "name",
            "-f",
            "qcow2",
            "disk.qcow2",
        ],
    ] {
        let served = place.serve(words);
        let ours = place.must("qemu-nbd", &["-L", "-k", &place.name("socket")]);
        let list = Said::of(place.server().args(["-L", "-k"]).arg(place.path("socket")));
        assert_eq!(list.out, ours, "both listings agree");
        served.end();
        assert!(!place.has("socket"));

        let pid_file = place.name("pid");
        let socket = place.name("socket");
        let image = place.name("disk.qcow2");
        let mut theirs = words.to_vec();
        theirs.pop();
        theirs.extend(["-k", &socket, "--fork", "--pid-file", &pid_file, &image]);
        place.must("qemu-nbd", &theirs);
        let expected = place.must("qemu-nbd", &["-L", "-k", &socket]);
        let pid = fs::read_to_string(&pid_file).expect("read the pid");
        place.must("kill", &[pid.trim()]);
        assert_eq!(ours, expected);
        while place.has("socket") {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn nbdinfo_maps_data_and_holes() {
    let place = Place::new();
    let served = place.serve(&["-t", "-e", "4", "-f", "qcow2", "disk.qcow2"]);
    let map = place.must("nbdinfo", &["--map", &place.uri()]);
    let fields: Vec<Vec<&str>> = map
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    let expected = [
        ["0", "2097152", "0", "data"],
        ["2097152", "3145728", "3", "hole,zero"],
        ["5242880", "3145728", "0", "data"],
    ];
    assert_eq!(fields, expected);
    served.end();
}

#[test]
fn bitmaps_are_shown_as_by_qemu_nbd() {
    let place = Place::new();
    let image = place.name("disk.qcow2");
    place.img(&["bitmap", "--add", "-g", "64k", &image, "b"]);
    place.must(
        "qemu-io",
        &["-c", "write 1M 100k", "-c", "discard 7M 64k", &image],
    );
    place.img(&["bitmap", "--add", "--disable", &image, "still"]);
    place.img(&["bitmap", "--merge", "b", &image, "still"]);
    let words = ["-r", "-f", "qcow2", "-B", "b", "-B", "still", &image];
    let ours = place.own("qemu-nbd").display().to_string();
    let ask = |server: &str, question: &str| {
        let mut all = vec![question, "--", "[", server];
        all.extend(words);
        place.must("nbdinfo", &[&all[..], &["]"]].concat())
    };
    for question in ["--map=qemu:dirty-bitmap:b", "--map=qemu:dirty-bitmap:still"] {
        let map = ask("qemu-nbd", question);
        assert!(map.contains("dirty"), "{map}");
        assert_eq!(ask(&ours, question), map);
    }
    let contexts = |server: &str| -> Vec<String> {
        let lines = ask(server, "--no-content");
        let named = |line: &&str| line.contains("qemu:") || line.contains("base:");
        lines.lines().filter(named).map(str::to_owned).collect()
    };
    assert_eq!(contexts(&ours), contexts("qemu-nbd"));
    assert_eq!(contexts(&ours).len(), 3);

    for name in ["none", ""] {
        let words = [
            "-f",
            "qcow2",
            "-B",
            name,
            "-k",
            &place.name("socket"),
            &image,
        ];
        let theirs = Said::of(Command::new("qemu-nbd").args(words));
        assert_eq!(place.refusal(&words), theirs.err);
    }
}

#[test]
fn a_bitmap_is_asked_while_the_guest_writes() {
    let place = Place::new();
    let image = place.name("disk.qcow2");
    place.img(&["bitmap", "--add", "-g", "64k", &image, "b"]);
    let served = place.serve(&["-t", "-e", "4", "-f", "qcow2", "-B", "b", "disk.qcow2"]);
    let dirty = || {
        let map = place.must("nbdinfo", &["--map=qemu:dirty-bitmap:b", &place.uri()]);
        let lines = map.lines().filter(|line| line.ends_with("dirty"));
        let words = lines.map(|line| {
            line.split_whitespace()
                .take(2)
                .collect::<Vec<_>>()
                .join(" ")
        });
        words.collect::<Vec<_>>()
    };
    assert!(dirty().is_empty());
    place.must("qemu-io", &["-f", "raw", "-c", "write 3M 4k", &place.uri()]);
    assert_eq!(dirty(), ["3145728 65536"]);
    place.must(
        "qemu-io",
        &["-f", "raw", "-c", "write -z 3211264 64k", &place.uri()],
    );
    assert_eq!(dirty(), ["3145728 131072"]);
    served.end();
    let info = place.img(&["info", &image]);
    assert!(!info.contains("in-use"), "{info}");
}

#[test]
fn copies_out_and_in_are_exact() {
    let place = Place::new();
    for (format, image) in [("raw", "disk.raw"), ("qcow2", "disk.qcow2")] {
        let served = place.serve(&["-t", "-e", "8", "-f", format, image]);
        let (uri, out) = (place.uri(), place.name("out"));
        place.must("nbdcopy", &[&uri, &out]);
        assert!(
            fs::read(&out).expect("read the copy") == pattern(),
            "nbdcopy from {format}"
        );
        place.img(&["convert", "-f", "raw", "-O", "raw", &uri, &out]);
        assert!(
            fs::read(&out).expect("read the copy") == pattern(),
            "convert from {format}"
        );
        place.img(&["compare", "-f", "raw", "-F", "raw", &uri, &out]);

        let mut other = pattern();
        other.reverse();
        place.write("other", &other);
        place.must("nbdcopy", &["--flush", &place.name("other"), &uri]);
        place.img(&[
            "compare",
            "-f",
            "raw",
            "-F",
            "raw",
            &uri,
            &place.name("other"),
        ]);
        served.end();
        let (image, other) = (place.name(image), place.name("other"));
        place.img(&["compare", "-f", format, "-F", "raw", &image, &other]);
        if format == "qcow2" {
            place.img(&["check", "-q", &image]);
        }
    }
}

#[test]
fn qemu_io_writes_zeroes_discards_and_flushes() {
    let place = Place::new();
    let served = place.serve(&["-t", "--discard=unmap", "-f", "qcow2", "disk.qcow2"]);
    let uri = place.uri();
    let commands = [
        "write -P 7 1000 70000",
        "write -f -P 9 1M 64k",
        "write -z -u 0 64k",
        "write -z 128k 64k",
        "discard 192k 64k",
        "aio_write -P 3 6M 1M",
        "aio_flush",
        "flush",
        "read -P 0 128k 64k",
        "read -P 9 1M 64k",
        "read -P 3 6M 1M",
    ];
    let mut words = vec!["-f", "raw"];
    for command in commands {
        words.extend(["-c", command]);
    }
    words.push(&uri);
    let text = place.must("qemu-io", &words);
    assert!(!text.contains("Pattern verification failed"), "{text}");
    served.end();
    place.img(&["check", "-q", &place.name("disk.qcow2")]);
}

#[test]
fn fio_verifies_what_it_wrote_over_several_connections() {
    let place = Place::new();
    let served = place.serve(&["-t", "-e", "4", "--cache=none", "-f", "qcow2", "disk.qcow2"]);
    let uri = format!("--uri={}", place.uri());
    place.must(
        "fio",
        &[
            "--name=j",
            "--ioengine=nbd",
            &uri,
            "--rw=randrw",
            "--bs=512-128k",
            "--iodepth=16",
            "--size=8M",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--thread",
            "--numjobs=1",
            "--aux-path=/tmp",
            "--verify_state_save=0",
        ],
    );
    served.end();
    place.img(&["check", "-q", &place.name("disk.qcow2")]);
}

#[test]
fn a_python_client_sees_chunks_and_errors() {
    let place = Place::new();
    let served = place.serve(&["-t", "-r", "-f", "qcow2", "disk.qcow2"]);
    let script = r#"
import sys, nbd
h = nbd.NBD()
h.add_meta_context("base:allocation")
h.connect_uri(sys.argv[1])
assert h.get_size() == 8 << 20 and h.is_read_only()
kinds = []
def chunk(data, offset, status, error):
    kinds.append((offset, len(data), status))
h.pread_structured(8 << 20, 0, chunk)
assert any(status == nbd.READ_HOLE for _, _, status in kinds), kinds
try:
    h.set_strict_mode(0)
    h.pwrite(b"x" * 512, 0)
    sys.exit("a write to a read-only export")
except nbd.Error as error:
    assert error.errno == "EPERM", error
h.shutdown()
"#;
    place.must("/usr/bin/python3", &["-c", script, &place.uri()]);
    served.end();
}

#[test]
fn fork_returns_when_clients_can_connect_and_signals_end_it_in_order() {
    let place = Place::new();
    let mut command = place.server();
    command.args(["--fork", "-t", "--pid-file", "pid", "-f", "qcow2", "-k"]);
    command.arg(place.path("socket")).arg("disk.qcow2");
    let done = Said::of(&mut command);
    assert_eq!(done.code, Some(0), "{}", done.err);
    let uri = place.uri();
    place.must("qemu-io", &["-f", "raw", "-c", "write -P 5 0 64k", &uri]);
    let pid = place.text("pid");
    place.must("kill", &["-s", "HUP", pid.trim()]);
    let deadline = Instant::now() + Duration::from_secs(20);
    while Path::new("/proc").join(pid.trim()).exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!place.has("socket"));
    let image = place.name("disk.qcow2");
    place.must("qemu-io", &["-f", "qcow2", "-c", "read -P 5 0 64k", &image]);

    // A child that cannot start makes its parent fail, with the reason.
    let text = place.refusal(&["--fork", "-f", "qcow2", "nope"]);
    assert!(
        text.starts_with("qemu-nbd: Failed to blk_new_open 'nope': "),
        "{text}"
    );
}

#[test]
fn the_server_leaves_with_its_last_client() {
    let place = Place::new();
    let served = place.serve(&["-f", "raw", "disk.raw"]);
    place.img(&["info", &place.uri()]);
    served.wait_for_success();
}

#[test]
fn refusals_are_those_of_qemu_nbd() {
    let place = Place::new();
    let socket = place.name("socket");
    let cases = [
        "-f qcow2 nope",
        "-f qcow2 disk.raw",
        "-f foo disk.raw",
        "-k SOCKET -o 99999999 -f raw disk.raw",
        "-k SOCKET -o 1k -f raw disk.raw",
        "-k SOCKET -o -1 -f raw disk.raw",
        "-k SOCKET -o -9223372036854775808 -f raw disk.raw",
        "-k SOCKET -o 99999999999999999999 -f raw disk.raw",
        "-k SOCKET -o 512 -l x -f qcow2 disk.qcow2",
        "-k SOCKET -o 99999999 -l x -f qcow2 disk.qcow2",
        "-k SOCKET -B x -f qcow2 disk.qcow2",
        "-k SOCKET -l x -f qcow2 disk.qcow2",
        "-k /nonexistent/socket -f raw disk.raw",
        "-k SOCKET --pid-file=/nonexistent/pid -f raw disk.raw",
        "-p abc -f raw disk.raw",
        "-L -k /nonexistent/socket",
        "a b",
        "--nonsense",
        "-k SOCKET --detect-zeroes=unmap disk.raw",
    ];
    for case in cases {
        let words: Vec<&str> = case
            .split(' ')
            .map(|word| if word == "SOCKET" { &socket } else { word })
            .collect();
        let theirs = Said::of(
            Command::new("qemu-nbd")
                .current_dir(place.root())
                .args(&words),
        );
        assert_eq!(place.refusal(&words), theirs.err, "{words:?}");
    }
}

#[test]
fn a_part_of_an_image_is_served() {
    let place = Place::new();
    let served = place.serve(&["-t", "-r", "-o", "0x100000", "-f", "raw", "disk.raw"]);
    let out = place.name("out");
    place.must("nbdcopy", &[&place.uri(), &out]);
    assert!(fs::read(&out).expect("read the copy") == pattern()[1 << 20..]);
    served.end();
}

/// Runs the server in a shell that sets `LISTEN_PID` to the server's own.
fn activated(place: &Place, redirection: &str) -> Said {
    let server = place.own("qemu-nbd").display().to_string();
    let serve = format!("exec {server} -f raw disk.raw {redirection}");
    place.shell(&format!("LISTEN_PID=$$ LISTEN_FDS=1 {serve}"))
}

#[test]
fn a_socket_that_was_promised_must_be_there_and_be_a_socket() {
    let place = Place::new();
    for (redirection, reason) in [
        (
            "3>&-",
            "invalid file descriptor fd = 3: Bad file descriptor",
        ),
        ("3</dev/null", "Socket operation on non-socket"),
    ] {
        let done = activated(&place, redirection);
        let text = done.err;
        assert_eq!(done.code, Some(1), "{text}");
        assert!(
            text.contains("ocket activation") && text.contains(reason),
            "{text}"
        );
    }
}

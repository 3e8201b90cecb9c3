//! `vellum nbd` with real clients: what they read, write and are told must be
//! right, and its command line must behave as that of `qemu-nbd`.

mod guessed;
mod sockets;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

const SIZE_BYTES: usize = 8 << 20;

/// Runs a program to its end; a missing one is an error that says what to do.
fn output(command: &mut Command) -> Output {
    let name = command.get_program().to_string_lossy().into_owned();
    command.output().unwrap_or_else(|error| match error.kind() {
        ErrorKind::NotFound => panic!("{name} is missing: run `cargo xtask setup`"),
        _ => panic!("{name}: {error}"),
    })
}

/// Runs a program that must succeed and returns what it prints.
fn run(program: &str, words: &[&str]) -> String {
    let done = output(Command::new(program).args(words));
    let errors = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{program} {words:?}: {errors}");
    String::from_utf8_lossy(&done.stdout).into_owned()
}

/// A folder with an image, a pattern in it, and `qemu-nbd` as a name of ours.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let link = folder.path().join("qemu-nbd");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_vellum"), link).expect("a link");
        let place = Place { folder };
        fs::write(place.path("disk.raw"), pattern()).expect("write the image");
        let (raw, qcow2) = (place.name("disk.raw"), place.name("disk.qcow2"));
        run(
            "qemu-img",
            &["convert", "-f", "raw", "-O", "qcow2", &raw, &qcow2],
        );
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn name(&self, name: &str) -> String {
        self.path(name).to_string_lossy().into_owned()
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.name("socket"))
    }

    fn server(&self) -> Command {
        let mut command = Command::new(self.path("qemu-nbd"));
        command.current_dir(self.folder.path());
        command
    }

    /// Serves an image on the socket, ready for clients.
    fn serve(&self, words: &[&str]) -> Served {
        let mut command = self.server();
        command.arg("-k").arg(self.path("socket")).args(words);
        let child = command
            .stderr(Stdio::piped())
            .spawn()
            .expect("start the server");
        let mut served = Served(Some(child));
        let deadline = Instant::now() + Duration::from_secs(30);
        while !self.path("socket").exists() {
            assert!(Instant::now() < deadline, "no socket in time");
            if let Some(child) = &mut served.0
                && let Ok(Some(status)) = child.try_wait()
            {
                panic!("the server ended with {status}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        served
    }

    /// What the program answers to a command line that it refuses.
    fn refusal(&self, words: &[&str]) -> String {
        let done = output(self.server().args(words));
        assert_eq!(done.status.code(), Some(1), "{words:?}");
        String::from_utf8_lossy(&done.stderr).into_owned()
    }
}

/// A running server.
struct Served(Option<Child>);

impl Served {
    fn signal(&self, name: &str) {
        if let Some(child) = &self.0 {
            run("kill", &["-s", name, &child.id().to_string()]);
        }
    }

    /// Waits for the end of the server and checks that it is a good one.
    fn wait(mut self) {
        let child = self.0.take().expect("waited for once");
        let done = child.wait_with_output().expect("wait for the server");
        let errors = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{}: {errors}", done.status);
    }

    fn terminate(self) {
        self.signal("TERM");
        self.wait();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            // Only after a failed test; it may be gone.
            let _ = child.kill();
            let _ = child.wait();
        }
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
        let ours = run("qemu-nbd", &["-L", "-k", &place.name("socket")]);
        let list = output(place.server().args(["-L", "-k"]).arg(place.path("socket")));
        assert_eq!(
            String::from_utf8_lossy(&list.stdout),
            ours,
            "both listings agree"
        );
        served.terminate();
        assert!(!place.path("socket").exists());

        let pid_file = place.name("pid");
        let socket = place.name("socket");
        let image = place.name("disk.qcow2");
        let mut theirs = words.to_vec();
        theirs.pop();
        theirs.extend(["-k", &socket, "--fork", "--pid-file", &pid_file, &image]);
        run("qemu-nbd", &theirs);
        let expected = run("qemu-nbd", &["-L", "-k", &socket]);
        let pid = fs::read_to_string(&pid_file).expect("read the pid");
        run("kill", &[pid.trim()]);
        assert_eq!(ours, expected);
        while place.path("socket").exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn nbdinfo_maps_data_and_holes() {
    let place = Place::new();
    let served = place.serve(&["-t", "-e", "4", "-f", "qcow2", "disk.qcow2"]);
    let map = run("nbdinfo", &["--map", &place.uri()]);
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
    served.terminate();
}

#[test]
fn bitmaps_are_shown_as_by_qemu_nbd() {
    let place = Place::new();
    let image = place.name("disk.qcow2");
    run("qemu-img", &["bitmap", "--add", "-g", "64k", &image, "b"]);
    run(
        "qemu-io",
        &["-c", "write 1M 100k", "-c", "discard 7M 64k", &image],
    );
    run(
        "qemu-img",
        &["bitmap", "--add", "--disable", &image, "still"],
    );
    run("qemu-img", &["bitmap", "--merge", "b", &image, "still"]);
    let words = ["-r", "-f", "qcow2", "-B", "b", "-B", "still", &image];
    let ours = place.name("qemu-nbd");
    let ask = |server: &str, question: &str| {
        let mut all = vec![question, "--", "[", server];
        all.extend(words);
        run("nbdinfo", &[&all[..], &["]"]].concat())
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
        let theirs = output(Command::new("qemu-nbd").args(words));
        assert_eq!(
            place.refusal(&words),
            String::from_utf8_lossy(&theirs.stderr)
        );
    }
}

#[test]
fn a_bitmap_is_asked_while_the_guest_writes() {
    let place = Place::new();
    let image = place.name("disk.qcow2");
    run("qemu-img", &["bitmap", "--add", "-g", "64k", &image, "b"]);
    let served = place.serve(&["-t", "-e", "4", "-f", "qcow2", "-B", "b", "disk.qcow2"]);
    let dirty = || {
        let map = run("nbdinfo", &["--map=qemu:dirty-bitmap:b", &place.uri()]);
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
    run("qemu-io", &["-f", "raw", "-c", "write 3M 4k", &place.uri()]);
    assert_eq!(dirty(), ["3145728 65536"]);
    run(
        "qemu-io",
        &["-f", "raw", "-c", "write -z 3211264 64k", &place.uri()],
    );
    assert_eq!(dirty(), ["3145728 131072"]);
    served.terminate();
    let info = run("qemu-img", &["info", &image]);
    assert!(!info.contains("in-use"), "{info}");
}

#[test]
fn copies_out_and_in_are_exact() {
    let place = Place::new();
    for (format, image) in [("raw", "disk.raw"), ("qcow2", "disk.qcow2")] {
        let served = place.serve(&["-t", "-e", "8", "-f", format, image]);
        let (uri, out) = (place.uri(), place.name("out"));
        run("nbdcopy", &[&uri, &out]);
        assert!(
            fs::read(&out).expect("read the copy") == pattern(),
            "nbdcopy from {format}"
        );
        run(
            "qemu-img",
            &["convert", "-f", "raw", "-O", "raw", &uri, &out],
        );
        assert!(
            fs::read(&out).expect("read the copy") == pattern(),
            "convert from {format}"
        );
        run(
            "qemu-img",
            &["compare", "-f", "raw", "-F", "raw", &uri, &out],
        );

        let mut other = pattern();
        other.reverse();
        fs::write(place.path("other"), &other).expect("write");
        run("nbdcopy", &["--flush", &place.name("other"), &uri]);
        run(
            "qemu-img",
            &[
                "compare",
                "-f",
                "raw",
                "-F",
                "raw",
                &uri,
                &place.name("other"),
            ],
        );
        served.terminate();
        let (image, other) = (place.name(image), place.name("other"));
        run(
            "qemu-img",
            &["compare", "-f", format, "-F", "raw", &image, &other],
        );
        if format == "qcow2" {
            run("qemu-img", &["check", "-q", &image]);
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
    let text = run("qemu-io", &words);
    assert!(!text.contains("Pattern verification failed"), "{text}");
    served.terminate();
    run("qemu-img", &["check", "-q", &place.name("disk.qcow2")]);
}

#[test]
fn fio_verifies_what_it_wrote_over_several_connections() {
    let place = Place::new();
    let served = place.serve(&["-t", "-e", "4", "--cache=none", "-f", "qcow2", "disk.qcow2"]);
    let uri = format!("--uri={}", place.uri());
    run(
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
    served.terminate();
    run("qemu-img", &["check", "-q", &place.name("disk.qcow2")]);
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
    run("/usr/bin/python3", &["-c", script, &place.uri()]);
    served.terminate();
}

#[test]
fn fork_returns_when_clients_can_connect_and_signals_end_it_in_order() {
    let place = Place::new();
    let mut command = place.server();
    command.args(["--fork", "-t", "--pid-file", "pid", "-f", "qcow2", "-k"]);
    command.arg(place.path("socket")).arg("disk.qcow2");
    let done = output(&mut command);
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    let uri = place.uri();
    run("qemu-io", &["-f", "raw", "-c", "write -P 5 0 64k", &uri]);
    let pid = fs::read_to_string(place.path("pid")).expect("read the pid");
    run("kill", &["-s", "HUP", pid.trim()]);
    let deadline = Instant::now() + Duration::from_secs(20);
    while Path::new("/proc").join(pid.trim()).exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!place.path("socket").exists());
    let image = place.name("disk.qcow2");
    run("qemu-io", &["-f", "qcow2", "-c", "read -P 5 0 64k", &image]);

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
    run("qemu-img", &["info", &place.uri()]);
    served.wait();
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
        let theirs = output(
            Command::new("qemu-nbd")
                .current_dir(place.folder.path())
                .args(&words),
        );
        assert_eq!(
            place.refusal(&words),
            String::from_utf8_lossy(&theirs.stderr),
            "{words:?}"
        );
    }
}

#[test]
fn a_part_of_an_image_is_served() {
    let place = Place::new();
    let served = place.serve(&["-t", "-r", "-o", "0x100000", "-f", "raw", "disk.raw"]);
    let out = place.name("out");
    run("nbdcopy", &[&place.uri(), &out]);
    assert!(fs::read(&out).expect("read the copy") == pattern()[1 << 20..]);
    served.terminate();
}

/// Runs the server in a shell that sets `LISTEN_PID` to the server's own.
fn activated(place: &Place, redirection: &str) -> Output {
    let script =
        format!("LISTEN_PID=$$ LISTEN_FDS=1 exec ./qemu-nbd -f raw disk.raw {redirection}");
    let mut command = Command::new("bash");
    output(
        command
            .current_dir(place.folder.path())
            .args(["-c", &script]),
    )
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
        let text = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{text}");
        assert!(
            text.contains("ocket activation") && text.contains(reason),
            "{text}"
        );
    }
}

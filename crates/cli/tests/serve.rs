//! `vellum serve`: one disk in several ways, and what is said about them. Needs root and
//! `/dev/fuse`, as the tests of disks as files do.

#[path = "../../export/tests/it/vhost_user_blk/guest.rs"]
mod guest;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use guest::{Guest, PATIENCE};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

struct Place(TempDir);

impl Place {
    /// A folder with an image, and a file to be hidden by its disk.
    fn new() -> Place {
        let place = Place(tempfile::tempdir().expect("a folder"));
        let made = place.run("qemu-img", &["create", "-q", "-f", "qcow2", "image", "8M"]);
        assert!(made.status.success(), "{made:?}");
        std::fs::write(place.path("disk"), "").expect("a file");
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.0.path()).args(words);
        command
    }

    fn run(&self, program: &str, words: &[&str]) -> Output {
        let output = self.command(program, words).output();
        output.expect("the programs of `cargo xtask setup`")
    }

    /// Starts `vellum serve`; returns it with what it has said by its last line, which begins
    /// like `last`.
    fn serve(&self, words: &[&str], last: &str) -> (Server, Vec<String>) {
        let mut command = self.command(VELLUM, &[&["serve"], words, &["image"]].concat());
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it runs");
        let output = child.stdout.take().expect("a pipe");
        let mut said = Vec::new();
        for line in BufReader::new(output).lines() {
            said.push(line.expect("text"));
            if said
                .last()
                .is_some_and(|line| line.trim().starts_with(last))
            {
                // libvirt's is the last of each way.
                let file = said.iter().any(|line| line.starts_with("file: "));
                if file || !words.contains(&"--fuse") {
                    break;
                }
            }
        }
        (Server(child), said)
    }

    /// Has the real `qemu-io` do something with a disk over NBD; whether it succeeded.
    fn nbd(&self, uri: &str, command: &str) -> bool {
        let output = self.run("qemu-io", &["-f", "raw", "-c", command, uri]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        output.status.success() && !said.contains("failed")
    }
}

/// A server, killed with the test that fails.
struct Server(Child);

impl Server {
    /// Ends it as people do.
    fn end(mut self) {
        terminate(self.0.id());
        assert_eq!(self.0.wait().expect("a child").code(), Some(0));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended already, unless a test failed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn terminate(pid: u32) {
    let told = Command::new("kill")
        .args(["-TERM", &pid.to_string()])
        .status();
    assert!(told.expect("kill").success());
}

/// The rest of the line that begins with `client`, behind `place`.
fn line<'a>(said: &'a [String], place: &str, client: &str) -> &'a str {
    let mut lines = said.iter().skip_while(|line| !line.starts_with(place));
    let found = lines.find_map(|line| line.trim().strip_prefix(client));
    found
        .unwrap_or_else(|| panic!("no {client} of {place} in {said:?}"))
        .trim()
}

#[test]
fn one_disk_is_had_in_three_ways() {
    let place = Place::new();
    let words = [
        "--nbd",
        "n.sock",
        "--vhost-user",
        "v.sock",
        "--queues",
        "2",
        "--fuse",
        "disk",
    ];
    let (server, said) = place.serve(&words, "libvirt:");
    let uri = line(&said, "NBD: ", "URI:").to_owned();
    assert!(place.nbd(&uri, "write -P 1 0 64k"));
    let mut guest = Guest::boot(&place.path("v.sock"), 2, 0);
    assert_eq!(guest.disk_bytes(), 8 << 20);
    assert_eq!(guest.queues[1].read_disk(8, 4096), (0, vec![1; 4096]));
    assert_eq!(guest.queues[0].write_disk(8, &[2; 4096]), 0);
    let disk = std::fs::File::options()
        .read(true)
        .write(true)
        .open(place.path("disk"));
    let disk = disk.expect("the disk");
    assert_eq!(disk.metadata().expect("a size").len(), 8 << 20);
    let mut sector = [0; 512];
    disk.read_exact_at(&mut sector, 4096).expect("read");
    assert_eq!(sector, [2; 512]);
    disk.write_all_at(&[3; 512], 8192).expect("written");
    disk.sync_all().expect("synced");
    drop(disk);
    assert!(place.nbd(&uri, "read -P 3 8192 512"));
    let vhost = line(&said, "vhost-user-blk: ", "cloud-hypervisor:");
    let socket = place.path("v.sock");
    assert!(
        vhost.contains(&format!("socket={},num_queues=2", socket.display())),
        "{vhost}"
    );
    drop(guest);
    server.end();
    assert!(!place.path("n.sock").exists() && !socket.exists());
    assert_eq!(
        std::fs::metadata(place.path("disk")).expect("a file").len(),
        0
    );
    assert!(
        place
            .run("qemu-img", &["check", "-q", "image"])
            .status
            .success()
    );
    assert!(place.nbd_free_read("read -P 3 8192 512"));
}

impl Place {
    /// As [`Place::nbd`], of the image itself.
    fn nbd_free_read(&self, command: &str) -> bool {
        let output = self.run("qemu-io", &["-f", "qcow2", "-c", command, "image"]);
        output.status.success() && !String::from_utf8_lossy(&output.stdout).contains("failed")
    }
}

/// What the guest had written and not flushed would be written again over it.
#[test]
fn what_others_have_made_durable_outlives_a_kill_beside_a_guest() {
    for cache in ["writeback", "writethrough"] {
        let place = Place::new();
        let words = [
            "--nbd",
            "n.sock",
            "--vhost-user",
            "v.sock",
            "--fuse",
            "disk",
            "--cache",
            cache,
        ];
        let (mut server, said) = place.serve(&words, "libvirt:");
        let uri = line(&said, "NBD: ", "URI:").to_owned();
        let mut guest = Guest::boot(&place.path("v.sock"), 1, 0);
        let disk = std::fs::File::options()
            .write(true)
            .open(place.path("disk"));
        let disk = disk.expect("the disk");
        let mut guest_writes =
            |block: u64| assert_eq!(guest.queues[0].write_disk(8 * block, &[5; 4096]), 0);
        guest_writes(0);
        assert!(place.nbd(&uri, "write -f -P 8 0 4k"));
        guest_writes(1);
        assert!(place.nbd(&uri, "write -z -f 4k 4k"));
        guest_writes(2);
        disk.write_all_at(&[7; 4096], 8192).expect("written");
        disk.sync_all().expect("synced");
        guest_writes(3);
        server.0.kill().expect("killed");
        server.0.wait().expect("a child");
        drop(disk);
        for socket in ["n.sock", "v.sock"] {
            std::fs::remove_file(place.path(socket)).expect("a socket that nobody has");
        }
        let (server, _said) = place.serve(&words, "libvirt:");
        guest.reconnect(&place.path("v.sock"));
        for (block, byte) in [8, 0, 7, 5].into_iter().enumerate() {
            let read = guest.queues[0].read_disk(8 * block as u64, 4096);
            let found = read.1[..1].to_vec();
            assert!(
                read == (0, vec![byte; 4096]),
                "block {block} with {cache}: {found:?}"
            );
        }
        drop(guest);
        server.end();
    }
}

/// Clients that do nothing take no descriptors that a guest needs, however many there are.
#[test]
fn idle_clients_do_not_keep_a_guest_out() {
    let place = Place::new();
    let words = "serve --shared=0 --nbd n.sock --vhost-user v.sock --queues 2 image";
    let limited = format!("ulimit -n 256; exec {VELLUM} {words}");
    let child = place
        .command("sh", &["-c", &limited])
        .stdout(Stdio::null())
        .spawn();
    let server = Server(child.expect("it runs"));
    wait_for(|| place.path("v.sock").exists() && place.path("n.sock").exists());
    // Each asks for the export without a name, and for nothing more.
    let asked = [&[0, 0, 0, 3][..], b"IHAVEOPT", &[0, 0, 0, 1, 0, 0, 0, 0]].concat();
    let connect = |_| {
        let client = UnixStream::connect(place.path("n.sock")).expect("a socket that listens");
        (&client).write_all(&asked).expect("a client that waits");
        client
    };
    let clients: Vec<UnixStream> = (0..250).map(connect).collect();
    let descriptors = format!("/proc/{}/fd", server.0.id());
    wait_for(|| std::fs::read_dir(&descriptors).expect("a process").count() >= 190);
    let mut guest = Guest::boot(&place.path("v.sock"), 2, 0);
    for queue in &mut guest.queues {
        assert_eq!(queue.write_disk(0, &[5; 4096]), 0);
    }
    drop((guest, clients));
    server.end();
}

/// What is printed for QEMU is what QEMU takes: its storage daemon reads the same options.
#[test]
fn the_line_for_qemu_opens_the_disk() {
    let place = Place::new();
    let words = ["-r", "--nbd", "a, b.sock", "-x", "one two"];
    let (server, said) = place.serve(&words, "libvirt:");
    let uri = line(&said, "NBD: ", "URI:");
    let read = place.run("qemu-io", &["-r", "-f", "raw", "-c", "read 0 64k", uri]);
    assert!(read.status.success(), "{uri}: {read:?}");
    assert!(!place.nbd(uri, "write 0 64k"));
    let qemu = line(&said, "NBD: ", "QEMU:");
    let script = format!("set -- {qemu}; exec qemu-io -r --image-opts -c 'read 0 64k' \"$2\"");
    let read = place.run("sh", &["-c", &script]);
    assert!(read.status.success(), "{qemu}: {read:?}");
    server.end();
}

#[test]
fn what_fails_leaves_nothing_behind() {
    let place = Place::new();
    for (words, message) in [
        (
            &["--nbd", "n.sock", "--fuse", "nosuch", "image"][..],
            "vellum serve: Failed to stat '",
        ),
        (
            &["--nbd", "n.sock", "nosuch"],
            "vellum serve: Failed to open 'nosuch': ",
        ),
        (
            &["image"],
            "vellum serve: Nothing says where the disk is to be had",
        ),
    ] {
        let output = place.run(VELLUM, &[&["serve"], words].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.starts_with(message), "{said}");
        assert!(!place.path("n.sock").exists());
    }
}

#[test]
fn in_the_background_it_is_there_when_the_command_ends() {
    let place = Place::new();
    let words = [
        "serve",
        "--fork",
        "--pid-file",
        "pid",
        "--nbd",
        "n.sock",
        "image",
    ];
    let mut command = place.command(VELLUM, &words);
    let told = command.stderr(Stdio::null()).output().expect("it runs");
    assert!(told.status.success());
    let said: Vec<String> = String::from_utf8_lossy(&told.stdout)
        .lines()
        .map(str::to_owned)
        .collect();
    assert!(place.nbd(line(&said, "NBD: ", "URI:"), "write -P 7 1M 64k"));
    let pid = std::fs::read_to_string(place.path("pid")).expect("a pid file");
    terminate(pid.trim().parse().expect("a number"));
    wait_for(|| !Path::new(&format!("/proc/{}", pid.trim())).exists());
    assert!(place.nbd_free_read("read -P 7 1M 64k"));
}

fn wait_for(is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "it does not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

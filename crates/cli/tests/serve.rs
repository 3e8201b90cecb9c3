//! `vellum serve`: one disk in several ways, and what is said about them. Needs root and
//! `/dev/fuse`, as the tests of disks as files do.

#[path = "../../export/tests/it/vhost_user_blk/guest.rs"]
mod guest;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;

use vellum_testing::{Folder, Running, Said, Words, signal, until};

use guest::Guest;

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

/// A folder with an image, and a file to be hidden by its disk.
fn folder() -> Folder {
    let folder = Folder::new(VELLUM);
    folder.img("create -q -f qcow2 image 8M");
    folder.write("disk", "");
    folder
}

/// Starts `vellum serve`; returns it with what it has said by its last line, which begins
/// like `last`.
fn serve(folder: &Folder, words: impl Words, last: &str) -> (Running, Vec<String>) {
    let words = [
        vec!["serve".to_owned()],
        words.words(),
        vec!["image".to_owned()],
    ]
    .concat();
    let mut command = folder.command("vellum", &words);
    let mut server = Running::start(command.stdout(Stdio::piped()));
    let output = server.child.stdout.take().expect("a pipe");
    let mut said = Vec::new();
    for line in BufReader::new(output).lines() {
        said.push(line.expect("text"));
        if said
            .last()
            .is_some_and(|line| line.trim().starts_with(last))
        {
            // libvirt's is the last of each way.
            let file = said.iter().any(|line| line.starts_with("file: "));
            if file || !words.iter().any(|word| word == "--fuse") {
                break;
            }
        }
    }
    (server, said)
}

/// Has the real `qemu-io` do something with a disk over NBD; whether it succeeded.
fn nbd(folder: &Folder, uri: &str, command: &str) -> bool {
    let said = folder.run("qemu-io", &["-f", "raw", "-c", command, uri]);
    said.code == Some(0) && !said.out.contains("failed")
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
    let folder = folder();
    let words = "--nbd n.sock --vhost-user v.sock --queues 2 --fuse disk";
    let (server, said) = serve(&folder, words, "libvirt:");
    let uri = line(&said, "NBD: ", "URI:").to_owned();
    assert!(nbd(&folder, &uri, "write -P 1 0 64k"));
    let mut guest = Guest::boot(&folder.path("v.sock"), 2, 0);
    assert_eq!(guest.disk_bytes(), 8 << 20);
    assert_eq!(guest.queues[1].read_disk(8, 4096), (0, vec![1; 4096]));
    assert_eq!(guest.queues[0].write_disk(8, &[2; 4096]), 0);
    let disk = std::fs::File::options()
        .read(true)
        .write(true)
        .open(folder.path("disk"));
    let disk = disk.expect("the disk");
    assert_eq!(disk.metadata().expect("a size").len(), 8 << 20);
    let mut sector = [0; 512];
    disk.read_exact_at(&mut sector, 4096).expect("read");
    assert_eq!(sector, [2; 512]);
    disk.write_all_at(&[3; 512], 8192).expect("written");
    disk.sync_all().expect("synced");
    drop(disk);
    assert!(nbd(&folder, &uri, "read -P 3 8192 512"));
    let vhost = line(&said, "vhost-user-blk: ", "cloud-hypervisor:");
    let socket = folder.path("v.sock");
    assert!(
        vhost.contains(&format!("socket={},num_queues=2", socket.display())),
        "{vhost}"
    );
    drop(guest);
    server.end();
    assert!(!folder.has("n.sock") && !socket.exists());
    assert_eq!(folder.len_bytes("disk"), 0);
    folder.img("check -q image");
    folder.io("image", &["read -P 3 8192 512"]);
}

/// What the guest had written and not flushed would be written again over it.
#[test]
fn what_others_have_made_durable_outlives_a_kill_beside_a_guest() {
    for cache in ["writeback", "writethrough"] {
        let folder = folder();
        let words = format!("--nbd n.sock --vhost-user v.sock --fuse disk --cache {cache}");
        let (server, said) = serve(&folder, &words, "libvirt:");
        let uri = line(&said, "NBD: ", "URI:").to_owned();
        let mut guest = Guest::boot(&folder.path("v.sock"), 1, 0);
        let disk = std::fs::File::options()
            .write(true)
            .open(folder.path("disk"));
        let disk = disk.expect("the disk");
        let mut guest_writes =
            |block: u64| assert_eq!(guest.queues[0].write_disk(8 * block, &[5; 4096]), 0);
        guest_writes(0);
        assert!(nbd(&folder, &uri, "write -f -P 8 0 4k"));
        guest_writes(1);
        assert!(nbd(&folder, &uri, "write -z -f 4k 4k"));
        guest_writes(2);
        disk.write_all_at(&[7; 4096], 8192).expect("written");
        disk.sync_all().expect("synced");
        guest_writes(3);
        server.kill();
        drop(disk);
        for socket in ["n.sock", "v.sock"] {
            folder.remove(socket);
        }
        let (server, _said) = serve(&folder, &words, "libvirt:");
        guest.reconnect(&folder.path("v.sock"));
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
    let folder = folder();
    let words = "serve --shared=0 --nbd n.sock --vhost-user v.sock --queues 2 image";
    let mut server = folder.shell_command(&format!("ulimit -n 256; exec $VELLUM {words}"));
    let server = Running::start(server.stdout(Stdio::null()));
    until("it happens", || {
        folder.has("v.sock") && folder.has("n.sock")
    });
    // Each asks for the export without a name, and for nothing more.
    let asked = [&[0, 0, 0, 3][..], b"IHAVEOPT", &[0, 0, 0, 1, 0, 0, 0, 0]].concat();
    let connect = |_| {
        let client = UnixStream::connect(folder.path("n.sock")).expect("a socket that listens");
        (&client).write_all(&asked).expect("a client that waits");
        client
    };
    let clients: Vec<UnixStream> = (0..250).map(connect).collect();
    let descriptors = format!("/proc/{}/fd", server.id());
    until("it happens", || {
        std::fs::read_dir(&descriptors).expect("a process").count() >= 190
    });
    let mut guest = Guest::boot(&folder.path("v.sock"), 2, 0);
    for queue in &mut guest.queues {
        assert_eq!(queue.write_disk(0, &[5; 4096]), 0);
    }
    drop((guest, clients));
    server.end();
}

/// What is printed for QEMU is what QEMU takes: its storage daemon reads the same options.
#[test]
fn the_line_for_qemu_opens_the_disk() {
    let folder = folder();
    let words = ["-r", "--nbd", "a, b.sock", "-x", "one two"];
    let (server, said) = serve(&folder, &words, "libvirt:");
    let uri = line(&said, "NBD: ", "URI:");
    folder.must("qemu-io", &["-r", "-f", "raw", "-c", "read 0 64k", uri]);
    assert!(!nbd(&folder, uri, "write 0 64k"));
    let qemu = line(&said, "NBD: ", "QEMU:");
    let script = format!("set -- {qemu}; exec qemu-io -r --image-opts -c 'read 0 64k' \"$2\"");
    folder.done(&script);
    server.end();
}

#[test]
fn what_fails_leaves_nothing_behind() {
    let folder = folder();
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
        let said = folder.refused("vellum", &[&["serve"], words].concat());
        assert!(said.starts_with(message), "{said}");
        assert!(!folder.has("n.sock"));
    }
}

#[test]
fn in_the_background_it_is_there_when_the_command_ends() {
    let folder = folder();
    let mut command = folder.command("vellum", "serve --fork --pid-file pid --nbd n.sock image");
    let told = Said::of(command.stderr(Stdio::null())).expect(0);
    let said: Vec<String> = told.out.lines().map(str::to_owned).collect();
    assert!(nbd(
        &folder,
        line(&said, "NBD: ", "URI:"),
        "write -P 7 1M 64k"
    ));
    let pid = folder.text("pid");
    signal(pid.trim().parse().expect("a number"), "-TERM");
    until("it happens", || {
        !Path::new(&format!("/proc/{}", pid.trim())).exists()
    });
    folder.io("image", &["read -P 7 1M 64k"]);
}

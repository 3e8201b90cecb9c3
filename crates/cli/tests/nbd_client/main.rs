//! Images behind NBD servers: `qemu-img` and `qemu-io` of ours beside the real ones, on
//! QEMU's server, ours and nbdkit's. The same command lines must print the same, end
//! with the same code and leave the same bytes.

mod place;
mod tls;

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use vellum_testing::{Running, Said, until};

use place::Place;

impl Place {
    /// Runs ours and the real program; both must say the same. Returns what that is.
    fn both(&self, program: &str, words: &[&str]) -> Said {
        let ours = self.run(&format!("our {program}"), words);
        let theirs = self.run(program, words);
        let (ours, theirs) = (without_times(ours), without_times(theirs));
        assert_eq!(ours, theirs, "{program} {words:?}");
        ours
    }

    /// Starts a server on the unix socket `socket` and waits for it.
    fn serve(&self, socket: &str, program: &str, words: &[&str]) -> Running {
        // The sign that it listens must be its own.
        let _ = fs::remove_file(self.path(socket));
        let mut command = self.command(program, words);
        let log = fs::File::create(self.path("server.log")).expect("a log");
        let mut server = Running::start(command.stderr(log));
        until("a socket", || {
            assert!(!server.has_ended(), "{program} {words:?}");
            self.has(socket)
        });
        server
    }

    /// Starts a server for any number of clients, with words of its own, on the socket `s`.
    fn export(&self, program: &str, words: &[&str]) -> Running {
        let socket = self.socket("s");
        let mut all = vec!["-t", "-e", "0", "-k", &socket];
        all.extend(words);
        self.serve("s", program, &all)
    }

    /// Runs commands of `qemu-io` that must succeed on a raw image.
    fn raw_io(&self, program: &str, image: &str, commands: &[&str]) -> String {
        let mut words = vec!["-f", "raw"];
        words.extend(commands.iter().flat_map(|command| ["-c", command]));
        words.push(image);
        self.must(program, &words)
    }

    fn socket(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn disk(&self, name: &str) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..8 << 20).map(|at| (at / 4096 % 251) as u8 | 1).collect();
        bytes[2 << 20..5 << 20].fill(0);
        let file = fs::File::create(self.path(name)).expect("a file");
        use std::os::unix::fs::FileExt;
        file.set_len(bytes.len() as u64).expect("a size");
        file.write_all_at(&bytes[..2 << 20], 0).expect("written");
        file.write_all_at(&bytes[5 << 20..], 5 << 20)
            .expect("written");
        bytes
    }
}

/// Times and rates differ from run to run.
fn without_times(said: Said) -> Said {
    let plain = |line: &str| match line.find(" ops; ") {
        Some(at) => format!("{} ops\n", &line[..at]),
        None => format!("{line}\n"),
    };
    Said {
        out: said.out.lines().map(plain).collect(),
        ..said
    }
}

#[test]
fn every_form_of_a_name_means_the_same_export() {
    let place = Place::new();
    place.disk("disk");
    let socket = place.socket("s");
    let _server = place.export("qemu-nbd", &["-r", "-f", "raw", "-x", "an export", "disk"]);
    let json = format!(
        "json:{{'driver':'raw','file':{{'driver':'nbd','export':'an export',\
         'server':{{'type':'unix','path':'{socket}'}}}}}}"
    );
    for name in [
        format!("nbd+unix:///an%20export?socket={socket}"),
        format!("nbd:unix:{socket}:exportname=an export"),
        json,
    ] {
        place.both("qemu-img", &["info", &name]);
        place.both("qemu-img", &["info", "--output=json", &name]);
        place.both("qemu-img", &["map", "--output=json", "-f", "raw", &name]);
        place.both(
            "qemu-img",
            &["compare", "-f", "raw", "-F", "raw", &name, "disk"],
        );
        place.both(
            "qemu-io",
            &["-r", "-f", "raw", "-c", "read -v 2M 1k", "-c", "map", &name],
        );
        place.both("qemu-io", &["-r", "-f", "raw", "-c", "info", &name]);
    }
    for options in [
        format!("driver=nbd,path={socket},export=an export"),
        format!("driver=raw,file.driver=nbd,file.path={socket},file.export=an export"),
        format!("driver=nbd,server.type=unix,server.path={socket},export=an export"),
        format!(
            "file.driver=nbd,file.server.type=unix,file.server.path={socket},file.export=an export"
        ),
    ] {
        place.both("qemu-img", &["info", "--image-opts", &options]);
        place.both("qemu-img", &["map", "--image-opts", &options]);
    }
}

#[test]
fn what_cannot_be_opened_is_told_in_the_same_words() {
    let place = Place::new();
    place.disk("disk");
    let socket = place.socket("s");
    let _server = place.export("qemu-nbd", &["-r", "-f", "raw", "-x", "e", "disk"]);
    for name in [
        format!("nbd+unix:///other?socket={socket}"),
        format!("nbd+unix:///e?socket={socket}2"),
        "nbd://127.0.0.1:1/e".to_owned(),
        "nbd://nobody.invalid/e".to_owned(),
        "nbd://".to_owned(),
        "nbd:".to_owned(),
        "nbd:here".to_owned(),
        "nbd+unix://host/e?socket=s".to_owned(),
        format!("nbd:unix:{socket}"),
    ] {
        let said = place.both("qemu-img", &["info", &name]);
        assert_eq!(said.code, Some(1), "{name}");
    }
    for options in [
        "driver=nbd".to_owned(),
        "driver=nbd,export=e".to_owned(),
        format!("driver=nbd,path={socket},host=h"),
        format!("driver=nbd,path={socket},port=1"),
        format!("driver=nbd,path={socket},server.type=unix"),
        format!("driver=nbd,path={socket},export=e,foo=bar"),
        format!("driver=nbd,path={socket},export=e,tls-creds=none"),
        format!("driver=nbd,path={socket}2,open-timeout=1"),
    ] {
        let said = place.both("qemu-img", &["info", "--image-opts", &options]);
        assert_eq!(said.code, Some(1), "{options}");
    }
    let name = format!("nbd+unix:///e?socket={socket}");
    let said = place.both("qemu-io", &["-f", "raw", "-c", "write 0 512", &name]);
    assert_eq!(said.code, Some(1));
}

#[test]
fn images_are_made_converted_and_written_on_servers() {
    let place = Place::new();
    let bytes = place.disk("disk");
    for server in ["qemu-nbd", "our qemu-nbd"] {
        place.write("target", vec![0xee; 16 << 20]);
        let socket = place.socket("s");
        let _server = place.export(server, &["-f", "raw", "--discard=unmap", "target"]);
        let name = format!("nbd+unix://?socket={socket}");
        place.must(
            "our qemu-img",
            &["convert", "-n", "-f", "raw", "-O", "raw", "disk", &name],
        );
        assert!(place.read("target")[..bytes.len()] == bytes);
        place.must(
            "our qemu-img",
            &["convert", "-f", "raw", "-O", "qcow2", "disk", &name],
        );
        place.both("qemu-img", &["check", &name]);
        place.both("qemu-img", &["info", &name]);
        place.must(
            "our qemu-img",
            &["convert", "-f", "qcow2", "-O", "raw", &name, "back"],
        );
        assert!(place.read("back") == bytes);
        place.must(
            "our qemu-img",
            &["create", "-q", "-f", "qcow2", &name, "64M"],
        );
        place.must(
            "our qemu-io",
            &["-c", "write -P 7 1M 1M", "-c", "write -z 10M 1M", &name],
        );
        place.must(
            "qemu-io",
            &[
                "-r",
                "-c",
                "read -P 7 1M 1M",
                "-c",
                "read -P 0 10M 1M",
                &name,
            ],
        );
        place.img(&["check", &name]);
    }
}

#[test]
fn a_backing_file_may_be_an_export() {
    let place = Place::new();
    place.disk("disk");
    let socket = place.socket("s");
    let _server = place.export("qemu-nbd", &["-r", "-f", "raw", "disk"]);
    let name = format!("nbd+unix://?socket={socket}");
    place.both(
        "qemu-img",
        &["create", "-f", "qcow2", "-b", &name, "-F", "raw", "top"],
    );
    place.io_by("our qemu-io", "top", &["write -P 9 3M 5k"]);
    place.both(
        "qemu-io",
        &[
            "-r",
            "-c",
            "read -P 9 3M 5k",
            "-c",
            "read -P 0 2M 1M",
            "top",
        ],
    );
    place.both("qemu-img", &["info", "--backing-chain", "top"]);
    place.both("qemu-img", &["map", "--output=json", "top"]);
    place.both(
        "qemu-img",
        &["compare", "-f", "qcow2", "-F", "raw", "top", "disk"],
    );
}

#[test]
fn bitmaps_of_a_server_can_be_looked_at() {
    let place = Place::new();
    place.img("create -q -f qcow2 image 8M");
    place.img("bitmap --add image b");
    place.io("image", &["write 1M 64k", "write 3M 192k"]);
    let socket = place.socket("s");
    for server in ["qemu-nbd", "our qemu-nbd"] {
        let _server = place.export(server, &["-r", "-f", "qcow2", "-B", "b", "-A", "image"]);
        for context in [
            "qemu:dirty-bitmap:b",
            "qemu:allocation-depth",
            "base:allocation",
        ] {
            let options = format!("driver=nbd,path={socket},x-dirty-bitmap={context}");
            let words = ["map", "--output=json", "--image-opts", &options];
            place.both("qemu-img", &words);
        }
    }
}

/// Runs nbdkit in the foreground.
fn nbdkit<'a>(socket: &'a str, words: &[&'a str]) -> Vec<&'a str> {
    let mut all = vec!["-f", "-U", socket];
    all.extend(words);
    all
}

#[test]
fn nbdkits_limits_on_blocks_are_kept() {
    let place = Place::new();
    let bytes = place.disk("disk");
    let socket = place.socket("s");
    for (least, most) in [("512", "64k"), ("4096", "1M"), ("65536", "1M")] {
        place.write("served", &bytes);
        let (least, most) = (
            format!("blocksize-minimum={least}"),
            format!("blocksize-maximum={most}"),
        );
        let words = [
            "--filter=blocksize-policy",
            "file",
            "served",
            "blocksize-error-policy=error",
            "blocksize-preferred=65536",
            &least,
            &most,
        ];
        let _server = place.serve("s", "nbdkit", &nbdkit(&socket, &words));
        let name = format!("nbd+unix://?socket={socket}");
        let commands = [
            "write -P 3 1000 70000",
            "write -z 4500000 300000",
            "read -P 3 1000 70000",
            "discard 6M 100k",
            "flush",
        ];
        place.raw_io("our qemu-io", &name, &commands);
        let commands = ["read -P 3 1000 70000", "read -P 0 4500000 300000"];
        place.raw_io("qemu-io", &name, &commands);
        let served = place.read("served");
        assert!(served[..1000] == bytes[..1000]);
        assert!(served[71_000..4_500_000] == bytes[71_000..4_500_000]);
        assert!(served[4_800_000..6 << 20] == bytes[4_800_000..6 << 20]);
    }
}

#[test]
fn servers_of_every_age_are_understood() {
    let place = Place::new();
    let bytes = place.disk("disk");
    let socket = place.socket("s");
    for words in [
        vec!["-o", "file", "disk"],
        vec!["--mask-handshake=0", "file", "disk"],
        vec!["--mask-handshake=1", "--no-sr", "file", "disk"],
        vec!["--no-sr", "file", "disk"],
        vec!["--filter=delay", "file", "disk", "rdelay=5ms"],
        vec!["-r", "file", "disk"],
    ] {
        let _server = place.serve("s", "nbdkit", &nbdkit(&socket, &words));
        let name = format!("nbd+unix://?socket={socket}");
        place.both("qemu-img", &["info", "-f", "raw", &name]);
        place.must(
            "our qemu-img",
            &["convert", "-f", "raw", "-O", "raw", &name, "copy"],
        );
        assert!(place.read("copy") == bytes, "{words:?}");
    }
}

#[test]
fn errors_of_a_server_arrive_as_they_are() {
    let place = Place::new();
    place.disk("disk");
    let socket = place.socket("s");
    for error in ["EIO", "ENOSPC", "EPERM", "ENOMEM"] {
        let kind = format!("error={error}");
        let words = ["--filter=error", "file", "disk", &kind, "error-rate=100%"];
        let _server = place.serve("s", "nbdkit", &nbdkit(&socket, &words));
        let name = format!("nbd+unix://?socket={socket}");
        place.both(
            "qemu-io",
            &[
                "-f",
                "raw",
                "-c",
                "read 0 4k",
                "-c",
                "write 0 4k",
                "-c",
                "write -z 0 4k",
                &name,
            ],
        );
    }
}

#[test]
fn a_restarted_server_is_found_again() {
    let place = Place::new();
    place.disk("disk");
    let socket = place.socket("s");
    let serve = || place.export("qemu-nbd", &["-f", "raw", "disk"]);
    let first = serve();
    let options = format!("driver=nbd,path={socket},reconnect-delay=20");
    let mut client = Command::new(place.own("qemu-io"))
        .args(["--image-opts", &options])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("started");
    use std::io::Write;
    let mut stdin = client.stdin.take().expect("a pipe");
    stdin
        .write_all(b"write -P 5 0 64k\nsleep 500\nwrite -P 6 64k 64k\n")
        .expect("written");
    stdin.flush().expect("written");
    std::thread::sleep(Duration::from_millis(250));
    drop(first);
    std::thread::sleep(Duration::from_millis(500));
    let _second = serve();
    stdin
        .write_all(b"read -P 6 64k 64k\nflush\nquit\n")
        .expect("written");
    drop(stdin);
    let done = client.wait_with_output().expect("ended");
    let out = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{out}");
    assert!(!out.contains("failed"), "{out}");
    assert!(out.contains("read 65536/65536"), "{out}");
    let commands = ["read -P 6 64k 64k", "read -P 5 0 64k"];
    place.raw_io("qemu-io", "disk", &commands);
}

//! Images on another machine by ssh: our programs, with OpenSSH's client and server.

mod cached;
#[path = "../nbd_client/place.rs"]
mod place;
mod sshd;

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use vellum_testing::{Running, until};

use place::Place;
use sshd::{Sshd, command, good, run};

/// With `disk.qcow2` of 64 MiB, and `disk.raw` with what it shows.
fn with_disk() -> Place {
    let place = Place::new();
    place.img("create -q -f qcow2 disk.qcow2 64M");
    let write = [
        "-c",
        "write -P 1 0 5M",
        "-c",
        "write -P 2 20M 3M",
        "disk.qcow2",
    ];
    place.must("qemu-io", &write);
    place.img("convert -O raw disk.qcow2 disk.raw");
    place
}

fn assert_equal(place: &Place, one: &str, other: &str) {
    let read = |name: &str| place.read(name);
    assert!(read(one) == read(other), "{one} and {other} differ");
}

/// Has our `qemu-nbd` serve an image; where to find it.
fn serve(place: &Place, words: &[&str]) -> (Running, String) {
    let socket = place.name("socket");
    let child = command(place, "qemu-nbd")
        .args(["-t", "-f", "raw", "-k", &socket])
        .args(words)
        .stdout(Stdio::null())
        .spawn();
    let server = Running {
        child: child.expect("our qemu-nbd"),
    };
    until("a socket", || place.has("socket"));
    (server, format!("nbd+unix://?socket={socket}"))
}

#[test]
fn images_are_copied_both_ways() {
    let place = with_disk();
    let server = Sshd::start(&place, "");
    let (far, back) = (server.url(&place, "far"), "back.raw");
    for format in ["raw", "qcow2"] {
        // The second one is made over the first one.
        good(
            &place,
            "qemu-img",
            &["convert", "-O", format, "disk.qcow2", &far],
        );
        if format == "qcow2" {
            place.img("check -q far");
        }
        let compared = good(
            &place,
            "qemu-img",
            &["compare", "-F", format, "disk.qcow2", &far],
        );
        assert_eq!(compared, "Images are identical.\n");
        good(
            &place,
            "qemu-img",
            &["convert", "-f", format, "-O", "raw", &far, back],
        );
        assert_equal(&place, back, "disk.raw");
    }
    let said = good(&place, "qemu-img", &["info", &far]);
    let wanted = format!("image: {far}\nfile format: qcow2\nvirtual size: 64 MiB");
    assert!(said.starts_with(&wanted), "{said}");
}

#[test]
fn what_is_written_is_what_is_read() {
    let place = with_disk();
    let server = Sshd::start(&place, "");
    let far = server.url(&place, "disk.raw");
    let mut model = place.read("disk.raw");
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..4 {
        let mut words = vec!["-f".to_owned(), "raw".to_owned(), far.clone()];
        for _ in 0..40 {
            let at = random.usize(..model.len() - (1 << 20)) & !511;
            let len = (1 + random.usize(..2047)) << 9;
            let byte = random.u8(1..);
            let (word, byte) = match random.u8(..4) {
                0 => (format!("read {at} {len}"), None),
                1 => (format!("write -z {at} {len}"), Some(0)),
                2 => (
                    format!("aio_write -P {byte} {at} {len}\naio_flush"),
                    Some(byte),
                ),
                _ => (format!("write -f -P {byte} {at} {len}"), Some(byte)),
            };
            for one in word.split('\n') {
                words.extend(["-c".to_owned(), one.to_owned()]);
            }
            if let Some(byte) = byte {
                model[at..at + len].fill(byte);
            }
        }
        words.extend(["-c".to_owned(), "flush".to_owned()]);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let said = good(&place, "qemu-io", &words);
        assert!(!said.contains("failed"), "{said}");
        assert!(place.read("disk.raw") == model);
        good(
            &place,
            "qemu-img",
            &["convert", "-f", "raw", "-O", "raw", &far, "copy"],
        );
        assert!(place.read("copy") == model);
    }
    good(&place, "qemu-img", &["resize", "-f", "raw", &far, "65M"]);
    good(
        &place,
        "qemu-img",
        &["resize", "-f", "raw", "--shrink", &far, "63M"],
    );
    assert!(place.read("disk.raw") == model[..63 << 20]);
}

#[test]
fn an_overlay_stands_on_a_far_image() {
    let place = with_disk();
    let server = Sshd::start(&place, "");
    let disk = server.url(&place, "disk.qcow2");
    good(
        &place,
        "qemu-img",
        &["create", "-f", "qcow2", "-b", &disk, "-F", "qcow2", "over"],
    );
    let io = [
        "-c",
        "write -P 9 1M 70k",
        "-c",
        "read -P 9 1M 70k",
        "-c",
        "read -P 2 20M 3M",
        "over",
    ];
    let said = good(&place, "qemu-io", &io);
    assert!(!said.contains("failed"), "{said}");
    // A disk that is written there grows there.
    let far = server.url(&place, "grown");
    good(&place, "qemu-img", &["create", "-f", "qcow2", &far, "64M"]);
    good(&place, "qemu-io", &["-c", "write -P 5 7M 9M", &far]);
    place.img("check grown");
    place.io("grown", &["read -P 5 7M 9M"]);
}

#[test]
fn who_cannot_be_believed_is_refused() {
    let place = with_disk();
    let server = Sshd::start(&place, "");
    let disk = server.url(&place, "disk.raw");
    let refused = |name: &str, wanted: &str| {
        let said = run(&place, "qemu-img", &["info", "-f", "raw", name]);
        assert_eq!(said.code, Some(1), "{name}: {}", said.out);
        assert!(said.err.contains(wanted), "{name}: {}", said.err);
    };
    let accepted = |name: &str| {
        let said = good(&place, "qemu-img", &["info", "-f", "raw", name]);
        assert!(said.contains("64 MiB"), "{said}");
    };
    // Another key than the one that is known.
    server.know(&place, "other-key");
    refused(&disk, "the key of the host is another one than ssh knows");
    accepted(&format!("{disk}?host_key_check=no"));
    place.write("known", "");
    refused(&disk, "connect once with 'ssh' to note the key");
    for kind in ["md5", "sha1", "sha256"] {
        let hash = place.must(
            "sh",
            &[
                "-c",
                &format!("cut -d' ' -f2 host-key.pub | base64 -d | {kind}sum | cut -d' ' -f1"),
            ],
        );
        let hash = hash.trim();
        accepted(&format!("{disk}?host_key_check={kind}:{hash}"));
        let (first, rest) = hash.split_at(2);
        accepted(&format!(
            "{disk}?host_key_check={kind}:{first}:{}",
            rest.to_uppercase()
        ));
        let wrong = hash.replace(|letter: char| letter.is_ascii_digit(), "f");
        refused(
            &format!("{disk}?host_key_check={kind}:{wrong}"),
            "does not match",
        );
        refused(&format!("{disk}?host_key_check={kind}:"), "does not match");
    }
    // No key that the server takes.
    place.write("authorized", "");
    refused(
        &format!("{disk}?host_key_check=no"),
        "no password is asked for",
    );
    let nobody = "ssh://127.0.0.1:1/disk";
    refused(nobody, "Connection refused");
}

#[test]
fn what_the_server_refuses_is_told() {
    let place = with_disk();
    let server = Sshd::start(&place, "-R");
    let said = run(
        &place,
        "qemu-img",
        &["info", &server.url(&place, "nothing")],
    );
    assert!(
        said.err.contains("there is no such file on the server"),
        "{}",
        said.err
    );
    let said = run(
        &place,
        "qemu-img",
        &["info", &server.url(&place, "programs")],
    );
    assert!(said.err.contains("it is a directory"), "{}", said.err);
    let disk = server.url(&place, "disk.raw");
    let said = run(
        &place,
        "qemu-io",
        &["-f", "raw", "-c", "write 0 512", &disk],
    );
    assert!(
        said.err
            .contains("the server does not permit it to this user"),
        "{}",
        said.err
    );
    let words = ["create", "-f", "raw", &server.url(&place, "new"), "1M"];
    let said = run(&place, "qemu-img", &words);
    assert!(
        said.err
            .contains("the server does not permit it to this user"),
        "{}",
        said.err
    );
    good(
        &place,
        "qemu-io",
        &["-r", "-f", "raw", "-c", "read -P 1 0 1M", &disk],
    );
}

#[test]
fn a_server_that_cannot_flush_is_told_of_once() {
    let place = with_disk();
    let server = Sshd::start(&place, "-P fsync");
    let disk = server.url(&place, "disk.raw");
    let words = [
        "-f",
        "raw",
        "-c",
        "write -P 3 0 64k",
        "-c",
        "flush",
        "-c",
        "flush",
        &disk,
    ];
    let said = run(&place, "qemu-io", &words);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert_eq!(
        said.err.matches("cannot make writes durable").count(),
        1,
        "{}",
        said.err
    );
}

#[test]
fn a_connection_that_breaks_is_made_anew_for_reads() {
    let place = with_disk();
    let server = Sshd::start(&place, "");
    let disk = server.url(&place, "disk.raw");
    let (_served, export) = serve(&place, &["-r", &disk]);
    let read = |what: &str| {
        let words = ["-r", "-f", "raw", "-c", what, &export];
        let said = place.run("qemu-io", &words);
        said.out + &said.err
    };
    assert!(read("read -P 1 0 64k").contains("read 65536/65536"));
    server.cut();
    assert!(read("read -P 2 20M 3M").contains("read 3145728/3145728"));
    // Again and again under one request.
    server.break_next(4);
    assert!(read("read -P 2 20M 3M").contains("read 3145728/3145728"));
    server.cut();
    place.write("disk.raw", vec![7; 1 << 20]);
    let said = read("read 20M 64k");
    assert!(said.contains("read failed: Input/output error"), "{said}");
}

#[test]
fn a_connection_that_breaks_ends_what_is_written() {
    let place = with_disk();
    let server = Sshd::start(&place, "");
    let disk = server.url(&place, "disk.raw");
    let (_served, export) = serve(&place, &[&disk]);
    let write = |what: &str| {
        let said = place.run("qemu-io", &["-f", "raw", "-c", what, &export]);
        said.out + &said.err
    };
    let said = write("write -P 3 0 64k");
    assert!(said.contains("wrote 65536/65536"), "{said}");
    server.cut();
    let said = write("write -P 4 0 64k");
    assert!(said.contains("write failed"), "{said}");
    let said = write("read 0 64k");
    assert!(said.contains("read failed"), "{said}");
}

#[test]
fn a_silent_server_is_given_up() {
    let place = with_disk();
    let server = Sshd::start(&place, "");
    let port = server.port.to_string();
    let path = place.name("disk.raw");
    let options = format!(
        "driver=raw,file.driver=ssh,file.server.host=127.0.0.1,file.server.port={port},\
         file.path={path},file.timeout=2"
    );
    let socket = place.name("socket");
    let child = command(&place, "qemu-nbd")
        .args(["-t", "-k", &socket, "--image-opts", &options])
        .spawn();
    let _served = Running {
        child: child.expect("our qemu-nbd"),
    };
    let export = format!("nbd+unix://?socket={socket}");
    until("a socket", || place.has("socket"));
    place.must("qemu-io", &["-f", "raw", "-c", "read -P 1 0 64k", &export]);
    server.hold(true);
    let begun = Instant::now();
    let said = place.run("qemu-io", &["-f", "raw", "-c", "read -P 1 0 64k", &export]);
    assert!((said.out + &said.err).contains("read failed"));
    // Nobody can open anything there either.
    let said = run(&place, "qemu-img", &["info", "--image-opts", &options]);
    assert_eq!(said.code, Some(1), "{}", said.out);
    assert!(begun.elapsed() < Duration::from_secs(120));
}

/// Puts a script in the place of the program `ssh`.
fn fake_ssh(place: &Place, script: &str) {
    let program = place.path("programs/ssh");
    fs::write(&program, format!("#!/bin/sh\n{script}\n")).expect("a file");
}

#[test]
fn a_server_that_breaks_the_protocol_is_refused() {
    let place = with_disk();
    let server = Sshd::start(&place, "");
    let port = server.port;
    let options = format!("driver=ssh,host=127.0.0.1,port={port},path=/x,timeout=2");
    let begun = Instant::now();
    for (script, wanted) in [
        (
            "echo 'Welcome to this host, and please read the rules.'",
            "keep to the SFTP protocol",
        ),
        ("exit 0", "has ended the connection"),
        ("echo 'nothing here' >&2; exit 255", "ssh: nothing here"),
        // Version 6; version 3 and no more; a handle of no length for an end.
        (
            r"printf '\0\0\0\5\2\0\0\0\6'; sleep 60",
            "speaks version 6 of SFTP",
        ),
        (
            r"printf '\0\0\0\5\2\0\0\0\3'; sleep 60",
            "the server is silent",
        ),
        (
            r"printf '\0\0\0\5\2\0\0\0\3\0\0\0\11\146\0\0\0\0\377\0\0\0'; sleep 60",
            "a message ends too early",
        ),
        (
            r"printf '\377\377\377\377\2'; sleep 60",
            "a message is too long",
        ),
    ] {
        fake_ssh(&place, script);
        let said = run(&place, "qemu-img", &["info", "--image-opts", &options]);
        assert_eq!(said.code, Some(1), "{script}: {}", said.out);
        assert!(said.err.contains(wanted), "{script}: {}", said.err);
    }
    assert!(begun.elapsed() < Duration::from_secs(120));
}

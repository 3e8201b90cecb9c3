//! A file behind a cache on this host: by its length and its time it is known to be the same one.

use std::fs;
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use crate::place::Place;
use crate::sshd::{Sshd, command, good, run};
use crate::with_disk;

/// The node of a file of the place behind the cache `cache`.
fn cached(place: &Place, server: &Sshd, more: &str) -> String {
    let path = place.name("disk.raw");
    let port = server.port;
    format!(
        r#"json:{{"driver":"raw","file":{{"driver":"cache","directory":"cache",{more}"file":{{"driver":"ssh","server":{{"host":"127.0.0.1","port":"{port}"}},"path":"{path}","timeout":2}}}}}}"#
    )
}

fn with_cache() -> (Place, Sshd) {
    let place = with_disk();
    let server = Sshd::start(&place, "");
    let mut folder = fs::DirBuilder::new();
    let made = folder.mode(0o700).create(place.path("cache"));
    made.expect("a folder");
    // A file of a moment ago has no version.
    set_time(&place, 1000);
    (place, server)
}

fn set_time(place: &Place, seconds_ago: u64) {
    let file = fs::File::options().write(true).open(place.path("disk.raw"));
    let time = SystemTime::now() - Duration::from_secs(seconds_ago);
    let set = file.and_then(|file| file.set_modified(time));
    set.expect("a time");
}

/// Changes the file as a program does that writes to it, so that its time is another one.
fn write_over(place: &Place, pattern: u8, seconds_ago: u64) {
    let words = [
        "-f",
        "raw",
        "-c",
        &format!("write -q -P {pattern} 0 64M"),
        "disk.raw",
    ];
    place.must("qemu-io", &words);
    set_time(place, seconds_ago);
}

#[test]
fn a_file_that_has_changed_is_another_one() {
    let (place, server) = with_cache();
    let image = cached(&place, &server, "");
    for pattern in 1..4 {
        write_over(&place, pattern, 1000 - u64::from(pattern));
        let read = format!("read -P {pattern} 0 64M");
        for _ in 0..2 {
            let said = good(&place, "qemu-io", &["-r", "-c", &read, &image]);
            assert!(said.contains("read 67108864/67108864 bytes"), "{said}");
            assert!(!said.contains("failed"), "{said}");
        }
    }
    // All of it is here: the server is not needed.
    server.refuse();
    let said = run(&place, "qemu-io", &["-r", "-c", "read -P 3 0 64M", &image]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(
        said.out.contains("read 67108864/67108864 bytes"),
        "{}",
        said.out
    );
    assert!(!said.out.contains("failed"), "{}", said.out);
    let words = "all of the file is in the cache";
    assert!(said.err.contains(words), "{}", said.err);
}

/// What is fetched after a change is no part of the version that was opened.
#[test]
fn a_file_that_changes_meanwhile_is_not_read_on() {
    let (place, server) = with_cache();
    write_over(&place, 1, 500);
    let image = cached(&place, &server, r#""readahead":0,"outage":3,"#);
    let mut child = command(&place, "qemu-io");
    child.args(["-r", &image]);
    child
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = child.spawn().expect("our qemu-io");
    let mut input = child.stdin.take().expect("a pipe");
    writeln!(input, "read -P 1 0 1M").expect("a pipe");
    // Until it has been read.
    vellum_testing::until("it is kept", || kept_bytes(&place) >= 1 << 20);
    write_over(&place, 2, 400);
    writeln!(
        input,
        "read -P 1 512k 64k\nread 8M 64k\nread -P 1 0 64k\nquit"
    )
    .expect("a pipe");
    drop(input);
    let done = child.wait_with_output().expect("our qemu-io");
    let (out, err) = (
        String::from_utf8_lossy(&done.stdout),
        String::from_utf8_lossy(&done.stderr),
    );
    assert_eq!(out.matches("read 65536/65536 bytes").count(), 2, "{out}");
    assert!(!out.contains("Pattern verification failed"), "{out}");
    assert!(out.contains("read failed"), "{out}");
    assert!(
        err.contains("the file has changed on the server since it was opened"),
        "{err}"
    );
    // The next one that opens it reads the new version.
    let said = good(&place, "qemu-io", &["-r", "-c", "read -P 2 0 64M", &image]);
    assert!(!said.contains("failed"), "{said}");
}

/// What the cache's files take.
fn kept_bytes(place: &Place) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let files = fs::read_dir(place.path("cache")).expect("a folder");
    // Files come and go.
    let blocks = files
        .flatten()
        .flat_map(|file| file.metadata())
        .map(|file| file.blocks());
    blocks.sum::<u64>() * 512
}

/// In an outage what is here does not notice, and what is not waits.
#[test]
fn an_outage_is_waited_for() {
    let (place, server) = with_cache();
    let image = cached(&place, &server, r#""readahead":0,"#);
    good(&place, "qemu-io", &["-r", "-c", "read -P 1 0 1M", &image]);
    server.break_next(2);
    let words = [
        "-r",
        "-c",
        "read -P 1 0 5M",
        "-c",
        "read -P 2 20M 3M",
        &image,
    ];
    let said = good(&place, "qemu-io", &words);
    assert!(said.contains("read 3145728/3145728 bytes"), "{said}");
    assert!(!said.contains("failed"), "{said}");
}

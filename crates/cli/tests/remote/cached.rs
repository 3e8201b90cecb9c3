//! Images behind a cache on this host: as a person uses it.

use std::fs;
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use vellum_testing::{Running, until};

use super::gateway::Gateway;
use super::place::Place;

const GOLDEN: &str = "s3://images/golden.qcow2";

/// The image behind the cache `cache`.
fn cached(more: &str) -> String {
    format!(
        r#"json:{{"driver":"qcow2","file":{{"driver":"cache","directory":"cache",{more}"file":{{"driver":"s3","url":"{GOLDEN}"}}}}}}"#
    )
}

fn with_golden() -> (Place, Gateway) {
    let place = Place::with_disk();
    let gateway = Gateway::start(&place);
    let mut folder = fs::DirBuilder::new();
    folder
        .mode(0o700)
        .create(place.path("cache"))
        .expect("a folder");
    place.fine(
        &gateway,
        &["convert", "-O", "qcow2", "www/disk.qcow2", GOLDEN],
    );
    (place, gateway)
}

#[test]
fn a_golden_image_is_needed_until_all_of_it_is_here() {
    let (place, mut gateway) = with_golden();
    let image = cached("");
    place.fine(
        &gateway,
        &["create", "-f", "qcow2", "-b", &image, "-F", "qcow2", "vm"],
    );
    let io = [
        "io",
        "-c",
        "read -P 1 0 1M",
        "-c",
        "write -P 9 1M 70k",
        "vm",
    ];
    place.fine(&gateway, &io);
    // Without the server a part is not enough.
    gateway.go_away();
    let said = place.vellum(&gateway, &["io", "-c", "read -P 1 0 1M", "vm"]);
    assert_eq!(said.code, Some(1), "{}", said.err);
    assert!(said.err.contains("the connection broke"), "{}", said.err);
    gateway.come_back(&place);
    let file = image.replacen("qcow2", "raw", 1);
    place.fine(&gateway, &["convert", "-O", "raw", &file, "copy"]);
    place.fine(&gateway, &["compare", &image, "www/disk.qcow2"]);
    gateway.go_away();
    let read = [
        "io",
        "-c",
        "read -P 2 20M 3M",
        "-c",
        "read -P 9 1M 70k",
        "vm",
    ];
    let said = place.vellum(&gateway, &read);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(
        said.err.contains("all of the file is in the cache"),
        "{}",
        said.err
    );
}

#[test]
fn disks_of_several_processes_share_a_cache_and_live_through_an_outage() {
    let (place, mut gateway) = with_golden();
    let environment = gateway.environment();
    let image = cached(r#""readahead":0,"#);
    let start = |number: usize| {
        let socket = place.path(&format!("socket{number}"));
        let mut command = Command::new(place.own("qemu-nbd"));
        command
            // Several at once: one waits while another one reads.
            .args(["-r", "-t", "-e", "0", "-f", "qcow2", "-k"])
            .arg(&socket)
            .arg(&image);
        command.envs(environment.clone()).current_dir(place.root());
        let server = Running {
            child: command.stdout(Stdio::null()).spawn().expect("our qemu-nbd"),
        };
        until("a socket", || socket.exists());
        (server, format!("nbd+unix://?socket={}", socket.display()))
    };
    let servers: Vec<_> = (0..3).map(start).collect();
    let read = |export: &str, what: &str| {
        place.must("qemu-io", &["-r", "-f", "raw", "-c", what, export]);
    };
    thread::scope(|scope| {
        for (_, export) in &servers {
            scope.spawn(|| read(export, "read -P 1 0 5M"));
        }
    });
    gateway.go_away();
    // What is here does not notice; what is not waits until the server is back.
    thread::scope(|scope| {
        let waiting = scope.spawn(|| read(&servers[0].1, "read -P 2 20M 3M"));
        for (_, export) in &servers {
            read(export, "read -P 1 0 5M");
        }
        assert!(!waiting.is_finished());
        thread::sleep(Duration::from_secs(1));
        gateway.come_back(&place);
        waiting.join().expect("a read");
    });
    let kinds = fs::read_dir(place.path("cache")).expect("a folder");
    assert_eq!(kinds.count(), 4, "a lock, and the files of one version");
}

/// With a monitor nodes stand on each other through others.
#[test]
fn a_daemon_with_a_monitor_has_caches_too() {
    let (place, gateway) = with_golden();
    let (golden, socket) = (cached(""), place.name("socket"));
    place.fine(
        &gateway,
        &["create", "-f", "qcow2", "-b", &golden, "-F", "qcow2", "vm"],
    );
    let inside = golden.strip_prefix("json:").expect("a name");
    let node = inside.replacen('{', r#"{"node-name":"golden","read-only":true,"#, 1);
    let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
    command.args([
        "daemon",
        "--chardev",
        "stdio,id=m",
        "--monitor",
        "chardev=m",
    ]);
    command.args(["--blockdev", &node]);
    command.args([
        "--blockdev",
        "driver=qcow2,node-name=vm,file.driver=file,file.filename=vm",
    ]);
    command.args([
        "--nbd-server",
        &format!("addr.type=unix,addr.path={socket}"),
    ]);
    command.args(["--export", "nbd,id=e,node-name=vm,writable=on"]);
    command
        .envs(gateway.environment())
        .current_dir(place.root());
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    let mut daemon = Running {
        child: command.spawn().expect("vellum daemon"),
    };
    until("a socket", || place.has("socket"));
    let export = format!("nbd+unix:///vm?socket={socket}");
    let words = [
        "-f",
        "raw",
        "-c",
        "read -P 1 0 1M",
        "-c",
        "write -P 9 1M 70k",
        &export,
    ];
    place.must("qemu-io", &words);
    let mut monitor = daemon.child.stdin.take().expect("a pipe");
    let end = br#"{"execute":"qmp_capabilities"}{"execute":"quit"}"#;
    monitor.write_all(end).expect("a pipe");
    assert_eq!(daemon.child.wait().expect("an end").code(), Some(0));
    place.fine(
        &gateway,
        &[
            "io",
            "-c",
            "read -P 9 1M 70k",
            "-c",
            "read -P 1 2M 1M",
            "vm",
        ],
    );
}

#[test]
fn what_makes_no_sense_is_refused() {
    let (place, gateway) = with_golden();
    for (image, message) in [
        (
            r#"json:{"driver":"cache","file":{"driver":"s3","url":"s3://images/golden.qcow2"}}"#,
            "cache driver requires a 'directory' option",
        ),
        (
            r#"json:{"driver":"cache","directory":"www","file":{"driver":"s3","url":"s3://images/golden.qcow2"}}"#,
            "a cache wants a folder",
        ),
        (
            r#"json:{"driver":"raw","file":{"driver":"cache","directory":"cache","file":{"driver":"null-co"}}}"#,
            "name this version with 'version'",
        ),
    ] {
        let said = place.vellum(&gateway, &["info", image]);
        assert_eq!(said.code, Some(1));
        assert!(said.err.contains(message), "{}", said.err);
    }
    let write = ["io", "-c", "write 0 512", &cached("")];
    let said = place.vellum(&gateway, &write);
    assert_eq!(said.code, Some(1));
    assert!(said.err.contains("make an overlay on it"), "{}", said.err);
}

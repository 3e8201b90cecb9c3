//! Sockets that others have, or had.

use std::io::Read;
use std::os::unix::net::UnixStream;

use super::*;

#[test]
fn a_second_server_leaves_a_live_socket_alone() {
    let place = Place::new();
    let served = place.serve(&["-t", "-f", "raw", "disk.raw"]);
    let (socket, program) = (place.name("socket"), env!("CARGO_BIN_EXE_vellum"));
    let server = format!("addr.type=unix,addr.path={socket}");
    let monitor = format!("socket,id=m,path={socket},server=on,wait=off");
    let qcow2 = ["nbd", "-k", &socket, "-f", "qcow2", "disk.qcow2"];
    let second: &[&[&str]] = &[
        &qcow2,
        &["daemon", "--nbd-server", &server],
        &["daemon", "--chardev", &monitor, "--monitor", "m"],
    ];
    for words in second {
        let mut command = Command::new(program);
        let done = Said::of(command.current_dir(place.root()).args(*words));
        let said = done.err;
        assert_eq!(done.code, Some(1), "{words:?}: {said}");
        assert!(said.contains("a server listens there"), "{words:?}: {said}");
    }
    place.img(&["info", &place.uri()]);
    served.end();

    // What is no socket stays too.
    let file = place.name("disk.raw");
    let words = ["nbd", "-k", &file, "-f", "qcow2", "disk.qcow2"];
    let mut command = Command::new(program);
    let done = Said::of(command.current_dir(place.root()).args(words));
    let said = done.err;
    assert!(said.contains("it is no socket"), "{said}");
    assert!(fs::read(&file).expect("still there") == pattern());
}

#[test]
fn the_socket_of_a_dead_server_is_replaced() {
    let place = Place::new();
    let served = place.serve(&["-t", "-f", "raw", "disk.raw"]);
    served.signal("-KILL");
    drop(served);
    assert!(place.has("socket"));
    let words = format!("nbd -k {} -f qcow2 disk.qcow2", place.name("socket"));
    let served = place.start("vellum", &words);
    let deadline = Instant::now() + Duration::from_secs(30);
    let socket = place.path("socket");
    // The dead server's socket may let a client in for a moment, but it greets nobody.
    while UnixStream::connect(&socket)
        .and_then(|mut stream| stream.read_exact(&mut [0]))
        .is_err()
    {
        assert!(Instant::now() < deadline, "nobody listens");
        std::thread::sleep(Duration::from_millis(5));
    }
    // The first client that chose the export ends it.
    place.img(&["info", &place.uri()]);
    served.wait_for_success();
}

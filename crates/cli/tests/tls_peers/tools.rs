//! The tools of GnuTLS and OpenSSL as peers. They speak no NBD: somebody between them and us
//! says what comes before TLS.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::intruders::ask_for_tls;
use super::{Place, Program, nbd, output, play};

const PATIENCE: Duration = Duration::from_secs(30);
/// How long a server may say nothing before it is cut off.
const SILENCE: Duration = Duration::from_secs(4);

/// A running program, killed when it is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(command: &mut Command) -> Running {
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    Running(child.unwrap_or_else(|error| {
        panic!("{command:?}: {error}: run `cargo xtask setup` if it is missing")
    }))
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    listener.local_addr().expect("an address").port()
}

/// Carries bytes in both directions until one side ends.
/// Asks the kernel: a connection that ends before the handshake can end gnutls-serv.
fn is_listened_at(port: u16) -> bool {
    const LISTENING: &str = "0A";
    let end = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let table = fs::read_to_string(table).unwrap_or_default();
        table.lines().skip(1).any(|line| {
            let mut words = line.split_whitespace().skip(1);
            let is_here = words.next().is_some_and(|local| local.ends_with(&end));
            is_here && words.nth(1) == Some(LISTENING)
        })
    })
}

fn carry(unix: UnixStream, tcp: TcpStream) {
    let (mut from, mut to) = (
        unix.try_clone().expect("a socket"),
        tcp.try_clone().expect("a socket"),
    );
    let there = std::thread::spawn(move || {
        // Either side may hang up.
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    });
    let (mut from, mut to) = (tcp, unix);
    let _ = io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
    there.join().expect("no panic");
}

/// Serves a unix socket with what stands at a port, behind an agreement to use TLS.
fn agree_before(socket: &str, port: u16) {
    let listener = UnixListener::bind(socket).expect("a socket");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a client");
            let agreed = nbd::option_reply(nbd::OPT_STARTTLS, nbd::REP_ACK, &[]);
            let said = stream
                .write_all(&nbd::greeting(true))
                .and_then(|()| stream.read_exact(&mut [0; 4]))
                .and_then(|()| nbd::next_option(&mut stream))
                .and_then(|_| stream.write_all(&agreed));
            if said.is_ok() {
                let server = TcpStream::connect(("127.0.0.1", port)).expect("a server");
                // It waits for the end of a line, which NBD does not have.
                server.set_read_timeout(Some(SILENCE)).expect("set");
                carry(stream, server);
            }
        }
    });
}

#[test]
fn gnutls_without_the_key_is_refused() {
    let place = Place::make();
    fs::write(
        place.path("other.psk"),
        "qemu:00112233445566778899aabbccddeeff\n",
    )
    .expect("written");
    let psk = "NORMAL:-KX-ALL:+ECDHE-PSK:+DHE-PSK:+PSK";
    let old = "NORMAL:-KX-ALL:+ECDHE-PSK:+DHE-PSK:+PSK:-VERS-TLS1.3";
    let certificate = [
        "--x509certfile",
        "server/server-cert.pem",
        "--x509keyfile",
        "server/server-key.pem",
    ];
    let cases = [
        (
            &["--pskpasswd", "keys/keys.psk", "--priority", psk][..],
            true,
        ),
        (&["--pskpasswd", "keys/keys.psk", "--priority", old], true),
        (&["--pskpasswd", "other.psk", "--priority", psk], false),
        (&["--pskpasswd", "other.psk", "--priority", old], false),
        (&certificate, false),
    ];
    let wrong = play(&cases, |number, (words, is_taken)| {
        let port = free_port();
        let mut command = place.command(Program::Qemu, "gnutls-serv");
        let _server = start(
            command
                .args(["--echo", "-p", &port.to_string()])
                .args(*words),
        );
        let deadline = Instant::now() + PATIENCE;
        while !is_listened_at(port) {
            assert!(Instant::now() < deadline, "no server in time");
            std::thread::sleep(Duration::from_millis(10));
        }
        let socket = place.name(&format!("s{number}"));
        agree_before(&socket, port);
        let object = format!(
            "tls-creds-psk,id=c,endpoint=client,dir={}",
            place.name("keys")
        );
        let options = format!("driver=nbd,path={socket},tls-creds=c");
        let mut wrong = Vec::new();
        for program in [Program::Ours, Program::Qemu] {
            let mut command = place.command(program, "qemu-img");
            let done =
                output(command.args(["info", "--object", &object, "--image-opts", &options]));
            let said = String::from_utf8_lossy(&done.stderr);
            // The server speaks no NBD: what is under TLS, fails with its first option.
            let taken = !said.contains("TLS handshake failed") && said.contains("option reply");
            if taken != *is_taken {
                wrong.push(format!("{program:?} {words:?}: {said}"));
            }
        }
        wrong
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Whoever has come in may not become somebody else on the way.
#[test]
fn openssl_may_not_renegotiate() {
    let place = Place::make();
    fs::write(place.path("disk"), b"the disk".repeat(8192)).expect("written");
    let socket = place.name("s");
    let object = format!(
        "tls-creds-x509,id=c,endpoint=server,dir={}",
        place.name("server")
    );
    let mut command = place.command(Program::Ours, "qemu-nbd");
    command.args(["-t", "-e", "0", "-r", "-f", "raw", "-k", &socket]);
    let _server = start(command.args(["--object", &object, "--tls-creds", "c", "disk"]));
    let deadline = Instant::now() + PATIENCE;
    while UnixStream::connect(&socket).is_err() {
        assert!(Instant::now() < deadline, "no server in time");
        std::thread::sleep(Duration::from_millis(5));
    }
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        let (tcp, _) = listener.accept().expect("a client");
        carry(ask_for_tls(&socket, &[]).expect("TLS"), tcp);
    });
    let mut command = place.command(Program::Qemu, "openssl");
    command.args([
        "s_client",
        "-tls1_2",
        "-connect",
        &format!("127.0.0.1:{port}"),
    ]);
    command.args([
        "-cert",
        "client/client-cert.pem",
        "-key",
        "client/client-key.pem",
    ]);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut client = command
        .spawn()
        .expect("openssl: run `cargo xtask setup` if it is missing");
    let mut heard = client.stdout.take().expect("a pipe");
    let mut said = client.stdin.take().expect("a pipe");
    // It listens for commands once it has told of the session.
    let mut text = String::new();
    let mut piece = [0; 4096];
    while !text.contains("Extended master secret") && !text.contains("---\nread R BLOCK") {
        let count = heard.read(&mut piece).expect("a pipe");
        assert!(count > 0, "no session: {text}");
        text.push_str(&String::from_utf8_lossy(&piece[..count]));
    }
    said.write_all(b"R\n").expect("a pipe");
    let done = client.wait_with_output().expect("an end");
    let told = String::from_utf8_lossy(&done.stderr);
    assert!(told.contains("no renegotiation"), "{told}");
}

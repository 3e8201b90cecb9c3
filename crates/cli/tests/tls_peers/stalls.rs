//! Peers that say nothing more, wherever in the handshake: nobody waits for them.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{Place, Program, nbd, output};

/// What is soon enough on a busy machine: much less than any limit of ours (10 s).
const SOON: Duration = Duration::from_secs(6);

/// How far a peer comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Silence {
    /// It says nothing at all.
    AtOnce,
    /// It has said hello.
    AfterGreeting,
    /// Both want TLS.
    BeforeTls,
    /// The beginning of a record came.
    WithinTls,
}

const SILENCES: [Silence; 4] = [
    Silence::AtOnce,
    Silence::AfterGreeting,
    Silence::BeforeTls,
    Silence::WithinTls,
];

/// A handshake record that is longer than what comes of it.
const BEGINNING: [u8; 7] = [22, 3, 1, 1, 0, 1, 0];

impl Silence {
    /// A server's part, up to its silence.
    fn serve(self, stream: &mut UnixStream) -> io::Result<()> {
        if self == Silence::AtOnce {
            return Ok(());
        }
        stream.write_all(&nbd::greeting(true))?;
        if self == Silence::AfterGreeting {
            return Ok(());
        }
        stream.read_exact(&mut [0; 4])?;
        nbd::next_option(stream)?;
        let agreed = nbd::option_reply(nbd::OPT_STARTTLS, nbd::REP_ACK, &[]);
        stream.write_all(&agreed)?;
        match self {
            Silence::WithinTls => {
                // What comes before the client's beginning is none of TLS to ours.
                stream.read_exact(&mut [0])?;
                stream.write_all(&BEGINNING)
            }
            _ => Ok(()),
        }
    }

    /// A client's part, up to its silence.
    fn call(self, socket: &str) -> io::Result<UnixStream> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(SOON))?;
        if self == Silence::AtOnce {
            return Ok(stream);
        }
        nbd::greet(&mut stream)?;
        if self == Silence::AfterGreeting {
            return Ok(stream);
        }
        nbd::ask(&mut stream, nbd::OPT_STARTTLS, &[])?;
        if self == Silence::WithinTls {
            stream.write_all(&BEGINNING)?;
        }
        Ok(stream)
    }
}

/// A server that falls silent; tells `met` of each client that it has done so.
fn silent_server(socket: &str, silence: Silence) -> std::sync::mpsc::Receiver<()> {
    let listener = UnixListener::bind(socket).expect("a socket");
    let (met, meets) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.expect("a client");
            // A client that gives up early is as good.
            let _ = silence.serve(&mut stream);
            kept.push(stream);
            if met.send(()).is_err() {
                return;
            }
        }
    });
    meets
}

/// Sends a signal, and waits for the end of a program that should come soon.
fn ends_soon(mut child: Child, signal: &str, what: &str) {
    let number = child.id().to_string();
    output(Command::new("kill").args([signal, &number]));
    let start = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        if start.elapsed() > SOON {
            // The failure is what counts.
            let _ = child.kill();
            panic!("{what}: {signal} did not end it");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn object(place: &Place, side: &str) -> String {
    let folder = place.name(side);
    format!("tls-creds-x509,id=c,endpoint={side},dir={folder}")
}

#[test]
fn a_client_waits_no_longer_than_it_is_told_to() {
    let place = Place::make();
    let object = object(&place, "client");
    for silence in SILENCES {
        let socket = place.name(&format!("{silence:?}"));
        let _meets = silent_server(&socket, silence);
        let options =
            format!("driver=nbd,path={socket},tls-creds=c,tls-hostname=localhost,open-timeout=1");
        let said = [Program::Ours, Program::Qemu].map(|program| {
            let mut command = place.command(program, "qemu-img");
            command.args(["info", "--object", &object, "--image-opts", &options]);
            let start = Instant::now();
            let done = output(&mut command);
            assert!(start.elapsed() < SOON, "{program:?} {silence:?}");
            String::from_utf8_lossy(&done.stderr).into_owned()
        });
        assert!(
            said[0].contains("Connection attempt cancelled by timeout"),
            "{silence:?}: {said:?}"
        );
        assert_eq!(said[0], said[1], "{silence:?}");
    }
}

#[test]
fn whoever_waits_for_a_silent_server_can_be_ended() {
    let place = Place::make();
    for silence in [Silence::AtOnce, Silence::WithinTls] {
        let socket = place.name(&format!("{silence:?}"));
        let meets = silent_server(&socket, silence);
        let object = object(&place, "client");
        let node = format!("driver=nbd,path={socket},tls-creds=c,tls-hostname=localhost");
        let named = format!(
            "driver=nbd,server.type=unix,server.path={socket},tls-creds=c,tls-hostname=localhost,\
             node-name=n"
        );
        let listens = place.name("listens");
        let image: &[&str] = &["--object", &object, "--image-opts", &node];
        for (program, words, signal) in [
            ("qemu-img", [&["info"][..], image].concat(), "-TERM"),
            (
                "qemu-img",
                [&["convert"][..], image, &["copy"]].concat(),
                "-TERM",
            ),
            ("qemu-nbd", [&["-k", &listens][..], image].concat(), "-TERM"),
            (
                "qemu-storage-daemon",
                vec!["--object", &object, "--blockdev", &named],
                "-TERM",
            ),
        ] {
            let mut command = place.command(Program::Ours, program);
            let child = command.args(words).stderr(Stdio::null()).spawn();
            let child = child.expect("started");
            meets.recv_timeout(SOON).expect("it comes");
            ends_soon(child, signal, &format!("{silence:?} {program}"));
        }
    }
}

#[test]
fn a_server_waits_for_no_silent_client() {
    let place = Place::make();
    fs::write(place.path("disk"), b"the disk".repeat(8192)).expect("written");
    let socket = place.name("listens");
    let object = object(&place, "server");
    let mut command = place.command(Program::Ours, "qemu-nbd");
    command.args(["-t", "-e", "0", "-r", "-f", "raw", "-k", &socket]);
    command.args(["--handshake-limit", "0", "--object", &object]);
    command.args(["--tls-creds", "c", "disk"]);
    let child = command.stderr(Stdio::null()).spawn().expect("started");
    let deadline = Instant::now() + Duration::from_secs(30);
    while UnixStream::connect(&socket).is_err() {
        assert!(Instant::now() < deadline, "no server in time");
        std::thread::sleep(Duration::from_millis(5));
    }
    let silent: Vec<_> = SILENCES
        .iter()
        .cycle()
        .take(40)
        .map(|silence| silence.call(&socket).expect("it comes so far"))
        .collect();
    // Others are served meanwhile.
    let object = self::object(&place, "client");
    let options = format!("driver=nbd,path={socket},tls-creds=c,tls-hostname=localhost");
    let mut command = place.command(Program::Qemu, "qemu-img");
    command.args(["info", "--object", &object, "--image-opts", &options]);
    let start = Instant::now();
    let done = output(&mut command);
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(start.elapsed() < SOON);
    ends_soon(child, "-TERM", "a server with silent clients");
    drop(silent);
}

/// What would let in whom it was meant to keep out, or trust whom nobody looks at.
#[test]
fn what_asks_for_proof_and_has_no_effect_is_refused() {
    let place = Place::make();
    let socket = place.name("s");
    let said = |program, words: &[&str]| {
        let done = output(place.command(Program::Ours, program).args(words));
        assert_eq!(done.status.code(), Some(1), "{words:?}");
        String::from_utf8_lossy(&done.stderr).into_owned()
    };
    let server = format!("addr.type=unix,addr.path={socket},tls-authz=a");
    let authz = "authz-simple,id=a,identity=CN=guest";
    let words = ["--object", authz, "--nbd-server", &server];
    let refusal = "tls-authz is not permitted without tls-creds";
    assert!(said("qemu-storage-daemon", &words).contains(refusal));
    let refusal = "--tls-authz is not permitted without --tls-creds";
    assert!(said("qemu-nbd", &["--tls-authz", "a", "disk"]).contains(refusal));
    let secret = "secret,id=x,data=hunter2,format=none";
    assert!(!said("qemu-storage-daemon", &["--object", secret]).contains("hunter2"));
    let keys = place.name("keys");
    for (options, refusal) in [
        (
            format!("driver=nbd,path={socket},tls-hostname=x"),
            "tls-hostname is not permitted without tls-creds",
        ),
        (
            format!("driver=nbd,filename=nbds+unix:///?socket={socket},tls-creds=c"),
            "tls-creds cannot be used with a name that begins with 'nbds'",
        ),
        (
            format!(
                "driver=nbd,filename=nbds+unix:///?socket={socket}&tls-psk-file={keys}/keys.psk\
                 &tls-certificates={keys}"
            ),
            "'tls-psk-file' and 'tls-certificates' are mutually exclusive",
        ),
        (
            format!("driver=nbd,filename=nbds+unix:///?socket={socket}&tls-username=qemu"),
            "'tls-username' is not permitted without 'tls-psk-file'",
        ),
    ] {
        let said = said("qemu-img", &["info", "--image-opts", &options]);
        assert!(said.contains(refusal), "{options}: {said}");
    }
    // These are QEMU's words.
    for (object, key) in [
        ("tls-creds-x509,id=c,dir=client,username=x", "username"),
        (
            "tls-creds-psk,id=c,dir=keys,sanity-check=no",
            "sanity-check",
        ),
        ("tls-creds-psk,id=c,dir=keys,passwordid=x", "passwordid"),
        ("tls-creds-anon,id=c,username=x", "username"),
    ] {
        for program in [Program::Ours, Program::Qemu] {
            let mut command = place.command(program, "qemu-nbd");
            let done = output(command.args(["-L", "-k", "/none", "--object", object]));
            let said = String::from_utf8_lossy(&done.stderr).into_owned();
            assert_eq!(
                said.trim(),
                format!("qemu-nbd: Parameter '{key}' is unexpected")
            );
        }
    }
}

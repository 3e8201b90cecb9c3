//! Clients that are not who they should be, and servers of every kind that meet them.

use std::fs;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use openssl::ssl::{
    Ssl, SslContext, SslContextBuilder, SslMethod, SslSession, SslSessionCacheMode, SslStream,
    SslVersion,
};

use super::authority::{Identity, Purpose, Wish};
use super::{KEY, Place, Program, Refused, Taken, Verdict, compare, intrusions, nbd, play};

/// What a server asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Server {
    /// A certificate from below the root.
    X509,
    /// The same, of a guest.
    Guests,
    /// Nothing, with a certificate of its own.
    Open,
    /// Nothing; whom it does not know stays outside.
    OpenToGuests,
    Psk,
    Anonymous,
}

const SERVERS: [Server; 6] = [
    Server::X509,
    Server::Guests,
    Server::Open,
    Server::OpenToGuests,
    Server::Psk,
    Server::Anonymous,
];

/// A running server, killed when it is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Server {
    fn socket(self, place: &Place, program: Program) -> String {
        place.name(&format!("{self:?}-{program:?}"))
    }

    /// Starts one and waits for it.
    fn start(self, place: &Place, program: Program) -> Running {
        let (certificates, keys) = (place.name("server"), place.name("keys"));
        let what = match self {
            Server::X509 | Server::Guests => format!("x509,dir={certificates}"),
            Server::Open | Server::OpenToGuests => {
                format!("x509,dir={certificates},verify-peer=no")
            }
            Server::Psk => format!("psk,dir={keys}"),
            Server::Anonymous => "anon".to_owned(),
        };
        let object = format!("tls-creds-{what},id=s,endpoint=server");
        let socket = self.socket(place, program);
        let mut command = place.command(program, "qemu-nbd");
        command.args(["-t", "-e", "0", "-r", "-f", "raw", "-k", &socket]);
        command.args(["--object", &object, "--tls-creds", "s"]);
        if matches!(self, Server::Guests | Server::OpenToGuests) {
            let guests = "authz-simple,id=a,identity=CN=guest";
            command.args(["--object", guests, "--tls-authz", "a"]);
        }
        let child = command.arg("disk").stderr(Stdio::null()).spawn();
        let mut running = Running(child.unwrap_or_else(|error| {
            panic!("{command:?}: {error}: run `cargo xtask setup` if it is missing")
        }));
        let deadline = Instant::now() + Duration::from_secs(30);
        while UnixStream::connect(&socket).is_err() {
            assert!(Instant::now() < deadline, "no server in time");
            if let Ok(Some(status)) = running.0.try_wait() {
                panic!("{command:?} ended with {status}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        running
    }
}

/// What a client does beside its TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// What it should.
    Usual,
    /// It asks for the disk in the clear.
    NoTls,
    /// The same, in the old way.
    NoTlsByName,
    /// It asks for the disk in the clear, behind its wish for TLS.
    SaysMoreBefore,
    /// It wants TLS within TLS, and is content without.
    Twice,
}

/// A client.
pub struct Intruder {
    context: SslContext,
    manner: Manner,
}

pub fn builder() -> SslContextBuilder {
    let mut builder = SslContextBuilder::new(SslMethod::tls_client()).expect("a context");
    // What is not secure is what is tried here.
    builder.set_security_level(0);
    builder.set_min_proto_version(None).expect("set");
    builder
        .set_cipher_list("ALL:!COMPLEMENTOFALL:@SECLEVEL=0")
        .expect("set");
    builder
}

/// An intruder with this TLS.
pub fn tls(setup: impl FnOnce(&mut SslContextBuilder)) -> Intruder {
    let mut builder = builder();
    setup(&mut builder);
    Intruder {
        context: builder.build(),
        manner: Manner::Usual,
    }
}

pub fn showing(identity: &Identity) -> Intruder {
    tls(|builder| identity.show(builder))
}

pub fn only(builder: &mut SslContextBuilder, version: SslVersion) {
    builder.set_min_proto_version(Some(version)).expect("set");
    builder.set_max_proto_version(Some(version)).expect("set");
}

pub fn knows(builder: &mut SslContextBuilder, user: &'static [u8], key: &'static [u8]) {
    builder.set_psk_client_callback(move |_, _, name, place| {
        name[..user.len()].copy_from_slice(user);
        name[user.len()] = 0;
        place[..key.len()].copy_from_slice(key);
        Ok(key.len())
    });
}

pub fn guest() -> Wish {
    Wish::new("guest", Purpose::Client)
}

/// Asks for TLS as far as a server's agreement.
pub fn ask_for_tls(socket: &str, more: &[u8]) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    nbd::greet(&mut stream)?;
    let said = [nbd::option(nbd::OPT_STARTTLS, &[]), more.to_vec()].concat();
    stream.write_all(&said)?;
    match nbd::answer(&mut stream)? {
        nbd::REP_ACK => Ok(stream),
        other => Err(io::Error::other(format!("no TLS: {other:#x}"))),
    }
}

impl Intruder {
    pub fn manner(mut self, manner: Manner) -> Self {
        self.manner = manner;
        self
    }

    /// Tries to get at the disk.
    fn try_it(&self, socket: &str) -> io::Result<[u8; 8]> {
        match self.manner {
            Manner::NoTls | Manner::NoTlsByName => {
                let mut stream = UnixStream::connect(socket)?;
                stream.set_read_timeout(Some(Duration::from_secs(20)))?;
                nbd::greet(&mut stream)?;
                if self.manner == Manner::NoTlsByName {
                    stream.write_all(&nbd::option(nbd::OPT_EXPORT_NAME, &[]))?;
                    return nbd::bytes(&mut stream);
                }
                return nbd::read_disk(&mut stream);
            }
            _ => {}
        }
        let more = match self.manner {
            Manner::SaysMoreBefore => nbd::option(nbd::OPT_GO, &[0; 6]),
            _ => Vec::new(),
        };
        let stream = ask_for_tls(socket, &more)?;
        let session = Ssl::new(&self.context).map_err(io::Error::other)?;
        let mut secured = SslStream::new(session, stream).map_err(io::Error::other)?;
        secured.connect().map_err(io::Error::other)?;
        if self.manner == Manner::Twice {
            let kind = nbd::ask(&mut secured, nbd::OPT_STARTTLS, &[])?;
            if kind == nbd::REP_ACK {
                return Err(io::Error::other("TLS within TLS"));
            }
        }
        nbd::read_disk(&mut secured)
    }
}

/// An intruder that meets a server.
pub struct Case {
    what: &'static str,
    server: Server,
    intruder: fn(&Place) -> Intruder,
    ours: Verdict,
    qemus: Verdict,
}

pub fn case(
    what: &'static str,
    server: Server,
    [ours, qemus]: [Verdict; 2],
    intruder: fn(&Place) -> Intruder,
) -> Case {
    Case {
        what,
        server,
        intruder,
        ours,
        qemus,
    }
}

fn meet(place: &Place, case: &Case) -> Vec<String> {
    let intruder = (case.intruder)(place);
    let found = [Program::Ours, Program::Qemu].map(|program| {
        match intruder.try_it(&case.server.socket(place, program)) {
            Ok(bytes) => {
                assert_eq!(&bytes, b"the disk", "{}", case.what);
                (Taken, String::new())
            }
            Err(error) => (Refused, error.to_string()),
        }
    });
    compare(case.what, [case.ours, case.qemus], found)
}

/// A place with all servers.
fn with_servers(servers: &[Server], programs: &[Program]) -> (Place, Vec<Running>) {
    let place = Place::make();
    fs::write(place.path("disk"), b"the disk".repeat(8192)).expect("written");
    let mut running = Vec::new();
    for server in servers {
        running.extend(
            programs
                .iter()
                .map(|program| server.start(&place, *program)),
        );
    }
    (place, running)
}

#[test]
fn clients_are_judged_as_qemu_does_or_more_strictly() {
    let (place, _running) = with_servers(&SERVERS, &[Program::Ours, Program::Qemu]);
    let cases: Vec<Case> = [
        intrusions::certificates(),
        intrusions::keys(),
        intrusions::manners(),
    ]
    .into_iter()
    .flatten()
    .collect();
    let wrong = play(&cases, |_, case| meet(&place, case));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A session that was good once must not stand for a certificate or a key later.
#[test]
fn nothing_is_resumed() {
    let (place, _running) = with_servers(&[Server::X509, Server::Psk], &[Program::Ours]);
    for (server, version) in [
        (Server::X509, SslVersion::TLS1_2),
        (Server::X509, SslVersion::TLS1_3),
        (Server::Psk, SslVersion::TLS1_2),
        (Server::Psk, SslVersion::TLS1_3),
    ] {
        let what = format!("{server:?} {version:?}");
        let kept: Arc<Mutex<Vec<SslSession>>> = Arc::default();
        let keep = kept.clone();
        let mut first = builder();
        only(&mut first, version);
        match server {
            Server::Psk => knows(&mut first, b"qemu", &KEY),
            _ => guest().signed_by(&place.root).show(&mut first),
        }
        first.set_session_cache_mode(SslSessionCacheMode::CLIENT);
        first.set_new_session_callback(move |_, session| {
            keep.lock().expect("no panic").push(session);
        });
        let first = Intruder {
            context: first.build(),
            manner: Manner::Usual,
        };
        let socket = server.socket(&place, Program::Ours);
        assert_eq!(
            &first.try_it(&socket).expect("the disk"),
            b"the disk",
            "{what}"
        );
        let sessions = std::mem::take(&mut *kept.lock().expect("no panic"));
        if version == SslVersion::TLS1_3 {
            assert!(sessions.is_empty(), "{what}: a ticket was given");
        }
        for session in sessions {
            let stream = ask_for_tls(&socket, &[]).expect("TLS");
            // Nothing to show but the session.
            let mut second = builder();
            only(&mut second, version);
            let mut second = Ssl::new(&second.build()).expect("a session");
            // SAFETY: the session is of a context with the same method and versions.
            unsafe { second.set_session(&session) }.expect("set");
            let mut secured = SslStream::new(second, stream).expect("a stream");
            let entered = secured.connect().is_ok() && nbd::read_disk(&mut secured).is_ok();
            assert!(!secured.ssl().session_reused(), "{what}: resumed");
            assert!(!entered, "{what}");
        }
    }
}

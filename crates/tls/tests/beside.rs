//! Sessions beside each other on a lane, and the two directions of one: none waits for, or
//! suffers from, another.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use openssl::asn1::Asn1Time;
use openssl::hash::MessageDigest;
use openssl::pkey::{PKey, Private};
use openssl::ssl::{Ssl, SslContext, SslMethod, SslStream, SslVerifyMode, SslVersion};
use openssl::x509::extension::{BasicConstraints, SubjectAlternativeName};
use openssl::x509::{X509, X509Name};
use tempfile::TempDir;
use vellum_io::lane::net::Stream;
use vellum_io::lane::{self, block_on};
use vellum_io::{Buffer, Buffers, spawn};
use vellum_nbd::{Secured, Upgrade};
use vellum_tls::{Client, Credentials, CredentialsOptions, Endpoint, Kind, Server};

/// How long somebody waits who should not have to.
const PATIENCE: Duration = Duration::from_secs(10);
/// More than a socket takes, and encrypted at once.
const MUCH: usize = 256 << 10;
/// The most data of a record, and what kind of record an alert is.
const RECORD_BYTES: usize = 16 << 10;
const ALERT: u8 = 21;

unsafe extern "C" {
    /// The crate `openssl` has no word for it.
    fn SSL_renegotiate(session: *mut openssl_sys::SSL) -> c_int;
}

struct Place {
    folder: TempDir,
}

impl Place {
    /// A folder for everybody's files. OpenSSL is loaded from here on.
    fn new() -> Self {
        let place = Place {
            folder: tempfile::tempdir().expect("a folder"),
        };
        drop(place.credentials(Kind::Anonymous, Endpoint::Client, "none"));
        place
    }

    fn credentials(&self, kind: Kind, endpoint: Endpoint, dir: &str) -> Arc<Credentials> {
        let options = CredentialsOptions {
            kind,
            endpoint,
            dir: Some(self.path(dir)),
            // The server that is only spoken to looks at nobody.
            verify_peer: dir != "careless",
            sanity_check: true,
            psk_file: None,
            username: None,
            password: None,
            priority: None,
        };
        Arc::new(Credentials::load(&options).expect("credentials"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn server(&self, dir: &str) -> Server {
        Server::new(self.credentials(Kind::X509, Endpoint::Server, dir), None)
    }

    fn client(&self, dir: &str) -> Client {
        let credentials = self.credentials(Kind::X509, Endpoint::Client, dir);
        Client::new(credentials, Some("localhost".to_owned()))
    }
}

fn name(common: &str) -> X509Name {
    let mut builder = X509Name::builder().expect("a name");
    builder.append_entry_by_text("CN", common).expect("set");
    builder.build()
}

/// Certifies `common` in the name of "root", whoever has the key that signs it.
fn certify(common: &str, key: &PKey<Private>, signs: &PKey<Private>) -> X509 {
    let mut builder = X509::builder().expect("a certificate");
    builder.set_version(2).expect("set");
    builder.set_subject_name(&name(common)).expect("set");
    builder.set_issuer_name(&name("root")).expect("set");
    builder.set_pubkey(key).expect("set");
    let day = |days| Asn1Time::days_from_now(days).expect("a time");
    builder.set_not_before(&day(0)).expect("set");
    builder.set_not_after(&day(10)).expect("set");
    let extension = if common == "root" {
        BasicConstraints::new().critical().ca().build()
    } else {
        let mut names = SubjectAlternativeName::new();
        names.dns(common).build(&builder.x509v3_context(None, None))
    };
    builder
        .append_extension(extension.expect("an extension"))
        .expect("set");
    builder.sign(signs, MessageDigest::null()).expect("signed");
    builder.build()
}

fn write(dir: &Path, side: &str, root: &X509, certificate: &X509, key: &PKey<Private>) {
    fs::create_dir_all(dir).expect("a folder");
    let files = [
        ("ca-cert.pem".to_owned(), root.to_pem()),
        (format!("{side}-cert.pem"), certificate.to_pem()),
        (format!("{side}-key.pem"), key.private_key_to_pem_pkcs8()),
    ];
    for (name, text) in files {
        fs::write(dir.join(name), text.expect("text")).expect("written");
    }
}

/// Both sides with certificates that are good, and a client with a forged one.
fn place() -> Place {
    let place = Place::new();
    let key = || PKey::generate_ed25519().expect("a key");
    let (root_key, server_key, client_key) = (key(), key(), key());
    let root = certify("root", &root_key, &root_key);
    let server = certify("localhost", &server_key, &root_key);
    write(&place.path("server"), "server", &root, &server, &server_key);
    write(
        &place.path("careless"),
        "server",
        &root,
        &server,
        &server_key,
    );
    let client = certify("guest", &client_key, &root_key);
    write(&place.path("client"), "client", &root, &client, &client_key);
    let forged = certify("guest", &client_key, &client_key);
    write(&place.path("forger"), "client", &root, &forged, &client_key);
    place
}

fn bytes(bytes: &[u8]) -> Buffers {
    Buffers::from_iter([Buffer::copy_of(bytes)])
}

async fn receive(secured: &Arc<dyn Secured>) -> Result<Vec<u8>, String> {
    let received = secured.clone().recv(Buffer::for_read(16)).await;
    let (buffer, count) = received.map_err(|error| error.message().to_owned())?;
    Ok(buffer[..count].to_vec())
}

/// Two sides of a session on the calling lane.
async fn connected(place: &Place) -> [Arc<dyn Secured>; 2] {
    let (one, other) = Stream::pair().expect("sockets");
    let connecting = spawn(place.client("client").upgrade(other));
    let server = place.server("server").upgrade(one).await.expect("a client");
    [server, connecting.await.expect("a server")]
}

#[test]
fn a_forged_certificate_ends_no_session_but_its_own() {
    let place = place();
    block_on(async {
        let [server, client] = connected(&place).await;
        let (one, other) = UnixStream::pair().expect("sockets");
        let forger = place.client("forger");
        // What fails within OpenSSL is of a thread: this one's is its own.
        let forging = thread::spawn(move || {
            block_on(async {
                let forged = forger.upgrade(Stream::from_fd(other.into())).await;
                match forged {
                    Ok(forged) => receive(&forged).await,
                    Err(error) => Err(error.message().to_owned()),
                }
            })
        });
        let judged = place.server("server").upgrade(Stream::from_fd(one.into()));
        let refusal = judged.await.expect_err("a forgery");
        assert_eq!(refusal.message(), "The certificate is not trusted");
        for (from, to) in [(&client, &server), (&server, &client)] {
            let to = to.clone();
            let receiving = spawn(async move { receive(&to).await });
            let sent = from.clone().send(bytes(b"x")).await.expect("sent");
            assert!(sent.1.is_none(), "{sent:?}");
            assert_eq!(receiving.await, Ok(b"x".to_vec()));
        }
        let forged = forging.join().expect("no panic");
        assert!(!matches!(forged, Ok(bytes) if !bytes.is_empty()));
    });
}

/// A socket of which nothing is received while that is not wanted.
struct Stubborn {
    socket: UnixStream,
    reads: bool,
}

impl Read for Stubborn {
    fn read(&mut self, place: &mut [u8]) -> io::Result<usize> {
        match self.reads {
            true => self.socket.read(place),
            false => Err(io::ErrorKind::WouldBlock.into()),
        }
    }
}

impl Write for Stubborn {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

type Peer = SslStream<Stubborn>;

/// A server's session with a client of that version that says something, and reads nothing
/// before it is told to, or loses its patience and leaves.
async fn with_stubborn(
    place: &Place,
    version: SslVersion,
    say: fn(&mut Peer),
    then: fn(&mut Peer),
) -> (Arc<dyn Secured>, Sender<()>, JoinHandle<()>) {
    let (go, told) = channel();
    let (one, socket) = UnixStream::pair().expect("sockets");
    let client = thread::spawn(move || {
        let mut builder = SslContext::builder(SslMethod::tls_client()).expect("a context");
        builder.set_verify(SslVerifyMode::NONE);
        builder.set_max_proto_version(Some(version)).expect("set");
        let session = Ssl::new(&builder.build()).expect("a session");
        let socket = Stubborn {
            socket,
            reads: true,
        };
        let mut peer = SslStream::new(session, socket).expect("a session");
        peer.connect().expect("a server");
        peer.get_mut().reads = false;
        say(&mut peer);
        told.recv_timeout(PATIENCE).expect("told to go on");
        peer.get_mut().reads = true;
        then(&mut peer);
    });
    let server = place.server("careless");
    let server = server.upgrade(Stream::from_fd(one.into()));
    (server.await.expect("a client"), go, client)
}

/// Its peer may be one that does not read before it is read from.
#[test]
fn who_receives_waits_for_nobody_who_sends() {
    let place = place();
    block_on(async {
        let (server, go, client) = with_stubborn(
            &place,
            SslVersion::TLS1_3,
            |peer| peer.write_all(b"x").expect("sent"),
            |peer| {
                let mut all = Vec::new();
                peer.read_to_end(&mut all).expect("all, and the goodbye");
                assert_eq!(all.len(), MUCH);
            },
        )
        .await;
        let sending = spawn(server.clone().send(bytes(&vec![1; MUCH])));
        lane::yield_now().await;
        // It has something to say, and its turn does not come.
        let leaving = spawn(server.clone().finish());
        lane::yield_now().await;
        assert_eq!(receive(&server).await, Ok(b"x".to_vec()));
        go.send(()).expect("it waits");
        let sent = sending.await.expect("sent");
        assert!(sent.1.is_none(), "{sent:?}");
        leaving.await.expect("a goodbye");
        client.join().expect("no panic");
    });
}

/// Has a session ask for another handshake, which nobody gives it.
fn renegotiate(peer: &mut Peer) {
    let pointer = std::ptr::from_ref(peer.ssl()).cast_mut().cast();
    // SAFETY: a reference to a session is a pointer to it, and nobody else has one.
    let asked = unsafe { SSL_renegotiate(pointer) };
    assert_eq!(asked, 1);
    peer.do_handshake().expect_err("no answer is read");
}

/// Reads the records of what was sent, and the answer.
fn expect_answer(peer: &mut Peer) {
    let socket = &mut peer.get_mut().socket;
    socket.set_read_timeout(Some(PATIENCE)).expect("set");
    let mut kinds = Vec::new();
    while kinds.last() != Some(&ALERT) {
        let mut header = [0; 5];
        socket.read_exact(&mut header).expect("a record");
        let len = u16::from_be_bytes([header[3], header[4]]);
        let body = &mut vec![0; usize::from(len)];
        socket.read_exact(body).expect("all of it");
        kinds.push(header[0]);
    }
    assert_eq!(kinds.len(), MUCH / RECORD_BYTES + 1, "{kinds:?}");
}

#[test]
fn what_is_read_is_answered_behind_what_is_being_sent() {
    let place = place();
    block_on(async {
        let version = SslVersion::TLS1_2;
        let (server, go, client) = with_stubborn(&place, version, renegotiate, expect_answer).await;
        let sending = spawn(server.clone().send(bytes(&vec![1; MUCH])));
        lane::yield_now().await;
        let receiver = server.clone();
        let receiving = spawn(async move { receive(&receiver).await });
        lane::yield_now().await;
        go.send(()).expect("it waits");
        let sent = sending.await.expect("sent");
        assert!(sent.1.is_none(), "{sent:?}");
        // The client has its answer, and leaves.
        let cut_off =
            "Cannot read from TLS channel: The TLS connection was non-properly terminated.";
        assert_eq!(receiving.await, Err(cut_off.to_owned()));
        client.join().expect("no panic");
    });
}

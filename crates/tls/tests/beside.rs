//! Sessions beside each other on a lane: none suffers from another.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use openssl::asn1::Asn1Time;
use openssl::hash::MessageDigest;
use openssl::pkey::{PKey, Private};
use openssl::x509::extension::{BasicConstraints, SubjectAlternativeName};
use openssl::x509::{X509, X509Name};
use tempfile::TempDir;
use vellum_io::lane::block_on;
use vellum_io::lane::net::Stream;
use vellum_io::{Buffer, Buffers, spawn};
use vellum_nbd::{Secured, Upgrade};
use vellum_tls::{Client, Credentials, CredentialsOptions, Endpoint, Kind, Server};

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

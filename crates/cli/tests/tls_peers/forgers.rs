//! Servers that are not who they should be, and clients of every kind that meet them.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use openssl::ssl::{Ssl, SslContext, SslContextBuilder, SslMethod, SslStream, SslVersion};

use super::authority::{Identity, Purpose, Wish};
use super::{Place, Program, Refused, Taken, Verdict, compare, forgeries, nbd, output, play};

/// How a client is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Client {
    /// It believes in the root, and wants a server of that name.
    X509(&'static str),
    /// It does not look at certificates.
    Careless,
    Psk,
    /// It speaks no TLS 1.3.
    PskOld,
    Anonymous,
}

impl Client {
    fn object(self, place: &Place) -> String {
        let (certificates, keys) = (place.name("client"), place.name("keys"));
        let what = match self {
            Client::X509(_) => format!("x509,dir={certificates}"),
            Client::Careless => format!("x509,dir={certificates},verify-peer=no"),
            Client::Psk => format!("psk,dir={keys}"),
            Client::PskOld => format!("psk,dir={keys},priority=NORMAL:-VERS-TLS1.3"),
            Client::Anonymous => "anon".to_owned(),
        };
        format!("tls-creds-{what},id=c,endpoint=client")
    }

    fn options(self, socket: &str) -> String {
        let options = format!("driver=raw,file.driver=nbd,file.path={socket},file.tls-creds=c");
        match self {
            Client::X509(name) => format!("{options},file.tls-hostname={name}"),
            Client::Careless => format!("{options},file.tls-hostname=localhost"),
            _ => options,
        }
    }

    /// The same in one name, if there is one.
    fn uri(self, place: &Place, socket: &str) -> Option<String> {
        let (certificates, keys) = (place.name("client"), place.name("keys/keys.psk"));
        let more = match self {
            Client::X509(name) => format!("tls-certificates={certificates}&tls-hostname={name}"),
            Client::Careless => format!("tls-certificates={certificates}&tls-verify-peer=no"),
            Client::Psk => format!("tls-psk-file={keys}&tls-username=qemu"),
            Client::PskOld | Client::Anonymous => return None,
        };
        Some(format!("nbds+unix:///?socket={socket}&{more}"))
    }
}

/// What a server does beside its TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// What it should.
    Usual,
    /// It does not know of TLS.
    NoTls,
    /// It agrees to TLS, and goes on in the clear.
    OnlySays,
    /// Behind its agreement it says what the client would ask for under TLS.
    SaysMoreBefore,
    /// It answers more than agreement.
    SaysMoreWithin,
    /// It knows no options.
    Old,
    /// It hangs up within an answer, without a goodbye.
    CutsOff,
}

/// A server that forges a disk.
pub struct Forger {
    context: SslContext,
    manner: Manner,
}

/// A forger with this TLS.
pub fn tls(setup: impl FnOnce(&mut SslContextBuilder)) -> Forger {
    let mut builder = SslContextBuilder::new(SslMethod::tls_server()).expect("a context");
    // What is not secure is what is tried here.
    builder.set_security_level(0);
    builder.set_min_proto_version(None).expect("set");
    builder
        .set_cipher_list("ALL:!COMPLEMENTOFALL:@SECLEVEL=0")
        .expect("set");
    setup(&mut builder);
    Forger {
        context: builder.build(),
        manner: Manner::Usual,
    }
}

/// A forger that shows this.
pub fn showing(identity: &Identity) -> Forger {
    tls(|builder| identity.show(builder))
}

pub fn only(builder: &mut SslContextBuilder, version: SslVersion) {
    builder.set_min_proto_version(Some(version)).expect("set");
    builder.set_max_proto_version(Some(version)).expect("set");
}

/// Certifies a server.
pub fn server(issuer: &Identity) -> Identity {
    local().signed_by(issuer)
}

pub fn local() -> Wish {
    Wish::new("localhost", Purpose::Server).also(&["DNS:localhost"])
}

pub fn knows(builder: &mut SslContextBuilder, key: &'static [u8]) {
    builder.set_psk_server_callback(move |_, _, place| {
        place[..key.len()].copy_from_slice(key);
        Ok(key.len())
    });
}

pub const WRONG_KEY: [u8; 16] = [7; 16];

impl Forger {
    pub fn manner(mut self, manner: Manner) -> Self {
        self.manner = manner;
        self
    }

    fn meet(&self, mut stream: UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        if self.manner == Manner::Old {
            // The size, no flags, and nothing.
            let mut said = b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53".to_vec();
            said.extend(nbd::SIZE_BYTES.to_be_bytes());
            said.extend([0; 128]);
            return stream.write_all(&said);
        }
        stream.write_all(&nbd::greeting(true))?;
        stream.read_exact(&mut [0; 4])?;
        if self.manner == Manner::NoTls {
            return nbd::serve(&mut stream, None);
        }
        let option = nbd::next_option(&mut stream)?;
        if option != nbd::OPT_STARTTLS {
            return Err(io::Error::other("TLS was not asked for"));
        }
        let agreed = nbd::option_reply(nbd::OPT_STARTTLS, nbd::REP_ACK, &[]);
        match self.manner {
            Manner::OnlySays => {
                stream.write_all(&agreed)?;
                return nbd::serve(&mut stream, None);
            }
            Manner::SaysMoreBefore => {
                // Extended headers and structured replies.
                let more = [11, 8].map(|option| nbd::option_reply(option, nbd::REP_ERR_UNSUP, &[]));
                stream.write_all(&[agreed, more.concat()].concat())?;
            }
            Manner::SaysMoreWithin => {
                let more = nbd::option_reply(nbd::OPT_STARTTLS, 3, &[0, 3, b'x']);
                stream.write_all(&[more, agreed].concat())?;
            }
            _ => stream.write_all(&agreed)?,
        }
        let session = Ssl::new(&self.context).map_err(io::Error::other)?;
        let mut secured = SslStream::new(session, stream).map_err(io::Error::other)?;
        secured.accept().map_err(io::Error::other)?;
        match self.manner {
            Manner::CutsOff => {
                nbd::serve(&mut secured, Some(100))?;
                secured.get_ref().shutdown(Shutdown::Both)
            }
            _ => {
                nbd::serve(&mut secured, None)?;
                // Its goodbye may find nobody.
                let _ = secured.shutdown();
                Ok(())
            }
        }
    }
}

/// A client that meets a forger.
pub struct Case {
    what: &'static str,
    client: Client,
    forger: fn(&Place) -> Forger,
    ours: Verdict,
    qemus: Verdict,
}

pub fn case(
    what: &'static str,
    client: Client,
    [ours, qemus]: [Verdict; 2],
    forger: fn(&Place) -> Forger,
) -> Case {
    Case {
        what,
        client,
        forger,
        ours,
        qemus,
    }
}

/// Has a program copy what a server shows.
fn copy(mut command: Command, source: &[&str], target: &Path) -> (Verdict, String) {
    command
        .args(["convert", "-O", "raw"])
        .args(source)
        .arg(target);
    let done = output(&mut command);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    if !done.status.success() {
        return (Refused, said);
    }
    let bytes = std::fs::read(target).expect("a copy");
    assert!(
        bytes.starts_with(nbd::FORGED),
        "a copy of something else: {said}"
    );
    (Taken, said)
}

fn meet(place: &Place, number: usize, case: &Case) -> Vec<String> {
    let socket = place.name(&format!("{:?}-{number}", std::thread::current().id()));
    let listener = UnixListener::bind(&socket).expect("a socket");
    let forger = (case.forger)(place);
    // It ends with the process, or when nobody can come any more.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // What a client does not like is judged by what the client says.
            let _ = forger.meet(stream.expect("a client"));
        }
    });
    let (object, options) = (case.client.object(place), case.client.options(&socket));
    let words = ["--object", &object, "--image-opts", &options];
    let target = place.path(&format!("copy of {}", case.what));
    let found = [Program::Ours, Program::Qemu].map(|program| {
        let command = place.command(program, "qemu-img");
        copy(command, &words, &target)
    });
    let mut wrong = compare(case.what, [case.ours, case.qemus], found);
    if let Some(uri) = case.client.uri(place, &socket) {
        let command = place.command(Program::Ours, "qemu-img");
        let (verdict, said) = copy(command, &["-f", "raw", &uri], &target);
        if verdict != case.ours {
            wrong.push(format!("{}: by its name: {verdict:?}: {said}", case.what));
        }
    }
    wrong
}

fn assert_judged(cases: &[Case]) {
    let place = Place::make();
    let wrong = play(cases, |number, case| meet(&place, number, case));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn certificates_are_judged_as_qemu_does_or_more_strictly() {
    assert_judged(&forgeries::certificates());
}

#[test]
fn names_are_judged_as_qemu_does_or_more_strictly() {
    assert_judged(&forgeries::names());
}

#[test]
fn servers_with_something_else_to_show_are_refused() {
    assert_judged(&forgeries::mixtures());
}

#[test]
fn a_server_proves_that_it_has_the_key() {
    assert_judged(&forgeries::keys());
}

#[test]
fn what_is_said_outside_of_tls_is_not_believed() {
    assert_judged(&forgeries::manners());
}

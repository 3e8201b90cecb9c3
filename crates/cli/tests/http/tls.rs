//! TLS before HTTP: `tls-creds`.

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use openssl::ssl::{SslConnector, SslMethod, SslStream, SslVerifyMode};

use crate::client::{Answer, ask, tcp};
use crate::place::{Daemon, PATIENCE, Place};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// What `certtool` makes in the folder `pki`.
fn certtool(place: &Place, words: &[&str], template: Option<&str>) {
    let folder = place.path("pki");
    let mut all: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    if let Some(template) = template {
        fs::write(folder.join("template"), template).expect("a file");
        all.extend(["--template".to_owned(), "template".to_owned()]);
    }
    let output = Command::new("certtool")
        .current_dir(&folder)
        .args(&all)
        .output();
    let output = output.expect("the program of `cargo xtask setup`");
    assert!(output.status.success(), "{words:?}: {output:?}");
}

/// Certificates in the folder `pki`: of a server `localhost`, of a client, and of who signs both.
fn make_certificates(place: &Place) {
    fs::create_dir(place.path("pki")).expect("a folder");
    let made = |words: &[&str], template: Option<&str>| certtool(place, words, template);
    for key in ["ca-key.pem", "server-key.pem", "client-key.pem"] {
        made(&["--generate-privkey", "--outfile", key], None);
    }
    let own = ["--generate-self-signed", "--load-privkey", "ca-key.pem"];
    made(
        &[&own[..], &["--outfile", "ca-cert.pem"]].concat(),
        Some("cn = \"CA\"\nca\ncert_signing_key\nexpiration_days = 30\n"),
    );
    for (side, names) in [
        (
            "server",
            "cn = \"localhost\"\ndns_name = \"localhost\"\ntls_www_server",
        ),
        ("client", "cn = \"me\"\ntls_www_client"),
    ] {
        let (key, certificate) = (format!("{side}-key.pem"), format!("{side}-cert.pem"));
        let signed = [
            "--generate-certificate",
            "--load-ca-certificate",
            "ca-cert.pem",
            "--load-ca-privkey",
            "ca-key.pem",
            "--load-privkey",
            &key,
            "--outfile",
            &certificate,
        ];
        let usage = "encryption_key\nsigning_key\nexpiration_days = 30\n";
        made(&signed, Some(&format!("{names}\n{usage}")));
    }
}

fn start(place: &Place) -> (Daemon, u16) {
    start_with(place, "off")
}

/// Clients show who they are, if `verify` is `on`.
fn start_with(place: &Place, verify: &str) -> (Daemon, u16) {
    make_certificates(place);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    drop(listener);
    let secret = format!("secret,id=t,data={TOKEN}");
    let credentials = format!("tls-creds-x509,id=c,endpoint=server,dir=pki,verify-peer={verify}");
    // Every address of this machine: what needs TLS and a token.
    let address = format!("0.0.0.0:{port},tls-creds=c,token-secret=t");
    let daemon = place.ours(&[
        "--object",
        &secret,
        "--object",
        &credentials,
        "--metrics",
        &address,
    ]);
    (daemon, port)
}

fn connect(place: &Place, port: u16) -> SslStream<TcpStream> {
    let mut builder = SslConnector::builder(SslMethod::tls()).expect("OpenSSL");
    builder
        .set_ca_file(place.path("pki/ca-cert.pem"))
        .expect("the authority");
    builder.set_verify(SslVerifyMode::PEER);
    let stream = tcp(port);
    builder
        .build()
        .connect("localhost", stream)
        .expect("a secured connection")
}

fn asked(place: &Place, port: u16, target: &str) -> Answer {
    let carried = format!("Bearer {TOKEN}");
    let headers = [
        ("Host", "disks.example.org"),
        ("Authorization", carried.as_str()),
    ];
    ask(&mut connect(place, port), ("GET", target), &headers, b"")
}

#[test]
fn requests_are_answered_under_tls_and_only_with_the_token() {
    let place = Place::new();
    let (daemon, port) = start(&place);
    assert_eq!(asked(&place, port, "/v1/disks").text(), "[]");
    // An answer of many records.
    let document = asked(&place, port, "/openapi.json");
    assert_eq!(document.json()["openapi"], "3.1.0");
    let without = ask(&mut connect(&place, port), ("GET", "/v1/disks"), &[], b"");
    assert_eq!(without.status, 401);
    // Whoever speaks no TLS is told nothing.
    let mut plain = tcp(port);
    let heard = crate::client::say(&mut plain, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert!(!heard.starts_with(b"HTTP"), "{heard:?}");
    daemon.end();
}

#[test]
fn clients_that_shake_no_hands_keep_nobody_out() {
    let place = Place::new();
    let (daemon, port) = start(&place);
    let mut silent: Vec<TcpStream> = (0..200).map(|_| tcp(port)).collect();
    for stream in silent.iter_mut().step_by(2) {
        let _ = stream.write_all(b"\x16\x03\x01\x02\x00\x01");
    }
    let mut slow = connect(&place, port);
    slow.write_all(b"GET /v1/di").expect("it listens");
    let begin = Instant::now();
    assert_eq!(asked(&place, port, "/v1/disks").status, 200);
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "{:?}",
        begin.elapsed()
    );
    drop(silent);
    drop(slow);
    let begin = Instant::now();
    daemon.end();
    assert!(begin.elapsed() < PATIENCE, "{:?}", begin.elapsed());
}

/// `vellum ctl`, with a certificate of its own if there is one in the folder `own`.
fn ctl(place: &Place, line: &str) -> Output {
    place.write("token", TOKEN);
    Command::new(env!("CARGO_BIN_EXE_vellum"))
        .current_dir(place.root())
        .env_remove("VELLUM_CTL")
        .env("SSL_CERT_FILE", place.path("nosuch.pem"))
        .env("SSL_CERT_DIR", place.path("nosuch"))
        .args(["ctl", "list", "--output=json", "--token-file", "token"])
        .args(line.split_whitespace())
        .output()
        .expect("the program runs")
}

fn ctl_fails(place: &Place, line: &str) -> String {
    let output = ctl(place, line);
    assert_eq!(output.status.code(), Some(1), "{line}: {output:?}");
    assert!(output.stdout.is_empty(), "{line}: {output:?}");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn ctl_tells_a_token_only_to_a_daemon_that_has_proved_its_name() {
    let place = Place::new();
    let (daemon, port) = start(&place);
    // It needs no key of who signs.
    fs::create_dir(place.path("trust")).expect("a folder");
    fs::copy(
        place.path("pki/ca-cert.pem"),
        place.path("trust/ca-cert.pem"),
    )
    .expect("a file");
    let localhost = format!("--connect https://localhost:{port}");
    let output = ctl(&place, &format!("{localhost} --tls trust"));
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "[]");
    let named = ctl_fails(
        &place,
        &format!("--connect https://127.0.0.1:{port} --tls trust"),
    );
    assert!(named.contains("not valid for name"), "{named}");
    // Somebody else's authority.
    let again = ["--generate-self-signed", "--load-privkey", "client-key.pem"];
    fs::create_dir(place.path("other")).expect("a folder");
    certtool(
        &place,
        &[&again[..], &["--outfile", "../other/ca-cert.pem"]].concat(),
        Some("cn = \"CA\"\nca\ncert_signing_key\nexpiration_days = 30\n"),
    );
    let signed = ctl_fails(&place, &format!("{localhost} --tls other"));
    assert!(signed.contains("invalid peer certificate"), "{signed}");
    let system = ctl_fails(&place, &localhost);
    assert!(system.contains("--tls DIR"), "{system}");
    let missing = ctl_fails(&place, &format!("{localhost} --tls www"));
    assert!(missing.contains("ca-cert.pem' is missing"), "{missing}");
    let plain = ctl_fails(&place, &format!("--connect localhost:{port} --tls trust"));
    assert!(plain.contains("https://"), "{plain}");
    daemon.end();
}

#[test]
fn ctl_shows_a_daemon_its_certificate() {
    let place = Place::new();
    let (daemon, port) = start_with(&place, "on");
    let localhost = format!("--connect https://localhost:{port}");
    let output = ctl(&place, &format!("{localhost} --tls pki"));
    assert!(output.status.success(), "{output:?}");
    place.remove("pki/client-key.pem");
    let half = ctl_fails(&place, &format!("{localhost} --tls pki"));
    assert!(half.contains("without the other"), "{half}");
    place.remove("pki/client-cert.pem");
    ctl_fails(&place, &format!("{localhost} --tls pki"));
    daemon.end();
}

#[test]
fn ctl_sends_no_token_in_the_clear_to_another_machine() {
    let place = Place::new();
    let begin = Instant::now();
    for address in ["192.0.2.1:9100", "[2001:db8::1]:9100"] {
        let refused = ctl_fails(&place, &format!("--connect {address}"));
        for part in ["in the clear", "https://", "unix:"] {
            assert!(refused.contains(part), "{address}: {refused}");
        }
    }
    // Nobody has waited for an answer.
    assert!(begin.elapsed() < Duration::from_secs(5));
}

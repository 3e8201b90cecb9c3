//! TLS before HTTP: `tls-creds`.

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use openssl::ssl::{SslConnector, SslMethod, SslStream, SslVerifyMode};

use crate::client::{Answer, ask, tcp};
use crate::place::{Daemon, PATIENCE, Place};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// Certificates for `localhost` in the folder `pki`.
fn make_certificates(place: &Place) {
    let folder = place.path("pki");
    fs::create_dir(&folder).expect("a folder");
    let certtool = |words: &[&str], template: Option<&str>| {
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
    };
    for key in ["ca-key.pem", "server-key.pem"] {
        certtool(&["--generate-privkey", "--outfile", key], None);
    }
    certtool(
        &[
            "--generate-self-signed",
            "--load-privkey",
            "ca-key.pem",
            "--outfile",
            "ca-cert.pem",
        ],
        Some("cn = \"CA\"\nca\ncert_signing_key\nexpiration_days = 30\n"),
    );
    certtool(
        &[
            "--generate-certificate",
            "--load-privkey",
            "server-key.pem",
            "--load-ca-certificate",
            "ca-cert.pem",
            "--load-ca-privkey",
            "ca-key.pem",
            "--outfile",
            "server-cert.pem",
        ],
        Some(
            "cn = \"localhost\"\ndns_name = \"localhost\"\ntls_www_server\nencryption_key\nsigning_key\nexpiration_days = 30\n",
        ),
    );
}

fn start(place: &Place) -> (Daemon, u16) {
    make_certificates(place);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    drop(listener);
    let secret = format!("secret,id=t,data={TOKEN}");
    // Every address of this machine: what needs TLS and a token.
    let address = format!("0.0.0.0:{port},tls-creds=c,token-secret=t");
    let daemon = place.ours(&[
        "--object",
        &secret,
        "--object",
        "tls-creds-x509,id=c,endpoint=server,dir=pki,verify-peer=off",
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

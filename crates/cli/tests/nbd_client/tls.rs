//! TLS in both roles, with our program and QEMU's (which has GnuTLS) on either side.

use std::fs;
use std::time::{Duration, Instant};

use vellum_testing::Said;

use super::Place;

const CA: &str = "cn = \"CA\"\nca\ncert_signing_key\nexpiration_days = 100\n";
const SERVER: &str = "organization = \"Vellum\"\ncn = \"localhost\"\ndns_name = \"localhost\"\n\
                      ip_address = \"127.0.0.1\"\ntls_www_server\nencryption_key\nsigning_key\n\
                      expiration_days = 100\n";
const CLIENT: &str = "country = \"XX\"\norganization = \"Vellum, and others\"\ncn = \"guest\"\n\
                      tls_www_client\nencryption_key\nsigning_key\nexpiration_days = 100\n";
/// The client's name as it stands in an option list.
const CLIENT_NAME: &str = "C=XX,,O=Vellum\\,, and others,,CN=guest";

/// Our program and the real one, in all four combinations of server and client.
const PAIRS: [(&str, &str); 4] = [
    ("our qemu-nbd", "our qemu-img"),
    ("our qemu-nbd", "qemu-img"),
    ("qemu-nbd", "our qemu-img"),
    ("qemu-nbd", "qemu-img"),
];

/// Makes `DIR/ca-cert.pem` and a certificate for one side, signed by that authority.
fn certify(place: &Place, dir: &str, authority: &str, side: &str, template: &str) {
    fs::create_dir_all(place.path(dir)).expect("a folder");
    let file = |name: &str| format!("{dir}/{name}");
    let key = file(&format!("{side}-key.pem"));
    if !place.path(authority).exists() {
        let named = CA.replace("\"CA\"", &format!("\"{authority}\""));
        place.write("ca.cfg", named);
        let key = format!("{authority}.key");
        place.must("certtool", &["--generate-privkey", "--outfile", &key]);
        place.must(
            "certtool",
            &[
                "--generate-self-signed",
                "--load-privkey",
                &key,
                "--template",
                "ca.cfg",
                "--outfile",
                authority,
            ],
        );
    }
    fs::copy(place.path(authority), place.path(&file("ca-cert.pem"))).expect("copied");
    place.write("side.cfg", template);
    place.must("certtool", &["--generate-privkey", "--outfile", &key]);
    place.must(
        "certtool",
        &[
            "--generate-certificate",
            "--load-ca-privkey",
            &format!("{authority}.key"),
            "--load-ca-certificate",
            authority,
            "--load-privkey",
            &key,
            "--template",
            "side.cfg",
            "--outfile",
            &file(&format!("{side}-cert.pem")),
        ],
    );
}

/// Makes `DIR/keys.psk`, with a key that begins like that.
fn share_key(place: &Place, dir: &str, first: &str) {
    fs::create_dir_all(place.path(dir)).expect("a folder");
    let line = format!("qemu:{first}112233445566778899aabbccddeeff\n");
    fs::write(place.path(dir).join("keys.psk"), line).expect("written");
}

/// Starts a server with these objects and words, and asks it as a client with that object.
fn ask(place: &Place, pair: (&str, &str), server: &[&str], object: &str, more: &str) -> Said {
    let socket = place.socket("s");
    let _server = place.export(pair.0, &[&["-r", "-f", "raw", "disk"], server].concat());
    let options = format!("driver=nbd,path={socket},tls-creds=c{more}");
    place.run(
        pair.1,
        &["info", "--object", object, "--image-opts", &options],
    )
}

/// QEMU's server reads its keys when a client comes, and from another folder.
fn server_object(place: &Place, dir: &str, kind: &str) -> String {
    let dir = place.path(dir).display().to_string();
    format!("tls-creds-{kind},id=s,endpoint=server,dir={dir}")
}

fn client_object(dir: &str, kind: &str) -> String {
    format!("tls-creds-{kind},id=c,endpoint=client,dir={dir}")
}

fn assert_good(said: &Said, what: &str) {
    assert_eq!(said.code, Some(0), "{what}: {}", said.err);
    assert!(said.out.contains("virtual size: 8 MiB"), "{what}");
}

#[test]
fn certificates_are_exchanged_and_checked() {
    let place = Place::new();
    place.disk("disk");
    certify(&place, "server", "ca", "server", SERVER);
    certify(&place, "client", "ca", "client", CLIENT);
    certify(&place, "stranger", "other-ca", "client", CLIENT);
    let server = server_object(&place, "server", "x509");
    let words = ["--object", &server, "--tls-creds", "s"];
    let named = ",tls-hostname=localhost";
    for pair in PAIRS {
        let what = format!("{pair:?}");
        let client = client_object("client", "x509");
        assert_good(&ask(&place, pair, &words, &client, named), &what);
        let said = ask(&place, pair, &words, &client, "");
        let refusal = "No hostname for certificate validation";
        assert!(said.err.contains(refusal), "{what}: {}", said.err);
        let said = ask(&place, pair, &words, &client, ",tls-hostname=elsewhere");
        let refusal = "Certificate does not match the hostname elsewhere";
        assert!(said.err.contains(refusal), "{what}: {}", said.err);
        // It believes in another authority, and has its certificate from there.
        let stranger = client_object("stranger", "x509");
        let said = ask(&place, pair, &words, &stranger, named);
        let refusal = "The certificate hasn't got a known issuer";
        assert!(said.err.contains(refusal), "{what}: {}", said.err);
        // It believes, but is not believed.
        let careless = format!("{stranger},verify-peer=no");
        let said = ask(&place, pair, &words, &careless, named);
        assert_eq!(said.code, Some(1), "{what}: {}", said.out);
    }
}

#[test]
fn a_certificate_is_shown_only_where_it_may_be_taken() {
    let place = Place::new();
    place.disk("disk");
    certify(&place, "server", "ca", "server", SERVER);
    certify(&place, "stranger", "other-ca", "client", CLIENT);
    let server = server_object(&place, "server", "x509");
    let stranger = client_object("stranger", "x509");
    let client = format!("{stranger},verify-peer=no");
    for pair in PAIRS {
        let socket = place.socket("s");
        let words = ["-r", "-f", "raw", "-t", "-e", "0", "-k", &socket, "disk"];
        let words = [&words[..], &["--object", &server, "--tls-creds", "s"]].concat();
        let _server = place.serve("s", pair.0, &words);
        let options = format!("driver=nbd,path={socket},tls-creds=c,tls-hostname=localhost");
        let words = ["info", "--object", &client, "--image-opts", &options];
        assert_eq!(place.run(pair.1, &words).code, Some(1), "{pair:?}");
        let log = || place.text("server.log");
        let deadline = Instant::now() + Duration::from_secs(10);
        while !log().contains('\n') && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        let refusal = "Verify failed: No certificate was found.";
        assert!(log().contains(refusal), "{pair:?}: {}", log());
    }
}

#[test]
fn only_those_come_in_who_may() {
    let place = Place::new();
    place.disk("disk");
    certify(&place, "server", "ca", "server", SERVER);
    certify(&place, "client", "ca", "client", CLIENT);
    let server = server_object(&place, "server", "x509");
    let client = client_object("client", "x509");
    for (authorizer, allowed) in [
        (format!("authz-simple,id=a,identity={CLIENT_NAME}"), true),
        ("authz-simple,id=a,identity=CN=somebody".to_owned(), false),
        (
            "authz-list,id=a,policy=deny,rules.0.match=*CN=g*,rules.0.policy=allow,\
             rules.0.format=glob"
                .to_owned(),
            true,
        ),
    ] {
        let words = [
            "--object",
            &server,
            "--object",
            &authorizer,
            "--tls-creds",
            "s",
            "--tls-authz",
            "a",
        ];
        for pair in PAIRS {
            let said = ask(&place, pair, &words, &client, ",tls-hostname=localhost");
            let what = format!("{pair:?} {authorizer}");
            match allowed {
                true => assert_good(&said, &what),
                false => assert_eq!(said.code, Some(1), "{what}: {}", said.out),
            }
        }
    }
}

#[test]
fn keys_that_both_have_do_as_well() {
    let place = Place::new();
    place.disk("disk");
    share_key(&place, "keys", "00");
    share_key(&place, "wrong", "ff");
    let server = server_object(&place, "keys", "psk");
    let words = ["--object", &server, "--tls-creds", "s"];
    for pair in PAIRS {
        let what = format!("{pair:?}");
        let client = client_object("keys", "psk");
        assert_good(&ask(&place, pair, &words, &client, ""), &what);
        let old = format!("{client},priority=NORMAL:-VERS-TLS1.3");
        assert_good(&ask(&place, pair, &words, &old, ""), &what);
        let wrong = client_object("wrong", "psk");
        let said = ask(&place, pair, &words, &wrong, "");
        assert_eq!(said.code, Some(1), "{what}: {}", said.out);
        assert!(said.err.contains("TLS handshake failed"), "{}", said.err);
    }
}

#[test]
fn nobody_need_show_anything() {
    let place = Place::new();
    place.disk("disk");
    let server = "tls-creds-anon,id=s,endpoint=server";
    let words = ["--object", server, "--tls-creds", "s"];
    for pair in PAIRS {
        let client = "tls-creds-anon,id=c,endpoint=client";
        let said = ask(&place, pair, &words, client, "");
        assert_good(&said, &format!("{pair:?}"));
    }
}

#[test]
fn plain_and_secured_do_not_mix() {
    let place = Place::new();
    place.disk("disk");
    share_key(&place, "keys", "00");
    let client = client_object("keys", "psk");
    let socket = place.socket("s");
    let plain = format!("nbd+unix://?socket={socket}");
    let secured = format!("driver=nbd,path={socket},tls-creds=c");
    for server in ["our qemu-nbd", "qemu-nbd"] {
        let running = place.export(server, &["-r", "-f", "raw", "disk"]);
        let words = ["info", "--object", &client, "--image-opts", &secured];
        let said = place.both("qemu-img", &words);
        assert!(said.err.contains("TLS not configured"), "{}", said.err);
        drop(running);
        let object = server_object(&place, "keys", "psk");
        let words = [
            "-r",
            "-f",
            "raw",
            "--object",
            &object,
            "--tls-creds",
            "s",
            "disk",
        ];
        let _running = place.export(server, &words);
        let said = place.both("qemu-img", &["info", &plain]);
        assert!(
            said.err.contains("not permitted before TLS"),
            "{}",
            said.err
        );
        place.both("qemu-nbd", &["-L", "-k", &socket]);
    }
}

#[test]
fn much_goes_through_a_secured_connection() {
    let place = Place::new();
    let bytes = place.disk("disk");
    share_key(&place, "keys", "00");
    let (server, client) = (
        server_object(&place, "keys", "psk"),
        client_object("keys", "psk"),
    );
    let socket = place.socket("s");
    for program in ["our qemu-nbd", "qemu-nbd"] {
        place.write("target", vec![0xee; bytes.len()]);
        let words = [
            "-f",
            "raw",
            "--object",
            &server,
            "--tls-creds",
            "s",
            "target",
        ];
        let _server = place.export(program, &words);
        let target = format!("driver=raw,file.driver=nbd,file.path={socket},file.tls-creds=c");
        place.must(
            "our qemu-img",
            &[
                "convert",
                "-n",
                "--object",
                &client,
                "-f",
                "raw",
                "--target-image-opts",
                "disk",
                &target,
            ],
        );
        assert!(place.read("target") == bytes, "{program}");
        place.must(
            "our qemu-img",
            &[
                "convert",
                "--object",
                &client,
                "--image-opts",
                "-O",
                "raw",
                &target,
                "back",
            ],
        );
        assert!(place.read("back") == bytes, "{program}");
    }
}

#[test]
fn libnbd_and_nbdkit_agree() {
    let place = Place::new();
    let bytes = place.disk("disk");
    certify(&place, "both", "ca", "server", SERVER);
    certify(&place, "both", "ca", "client", CLIENT);
    share_key(&place, "both", "00");
    let socket = place.socket("s");
    let folder = place.name("both");
    let keys = format!("{folder}/keys.psk");
    let certificates =
        format!("nbds+unix:///?socket={socket}&tls-certificates={folder}&tls-hostname=localhost");
    let shared = format!("nbds+unix://qemu@/?socket={socket}&tls-psk-file={keys}");
    let ours = format!("nbds+unix:///?socket={socket}&tls-psk-file={keys}&tls-username=qemu");
    for (kind, uri) in [("x509", &certificates), ("psk", &shared)] {
        let object = server_object(&place, "both", kind);
        let words = [
            "-r",
            "-f",
            "raw",
            "--object",
            &object,
            "--tls-creds",
            "s",
            "disk",
        ];
        let _server = place.export("our qemu-nbd", &words);
        let said = place.must("nbdinfo", &["--size", uri]);
        assert_eq!(said.trim(), bytes.len().to_string(), "{kind}");
        place.must("nbdcopy", &[uri, "copy"]);
        assert!(place.read("copy") == bytes, "{kind}");
        let script = format!(
            "import nbd; h = nbd.NBD(); h.set_uri_allow_local_file(True); \
             h.connect_uri('{uri}'); assert h.pread(4096, 0) == open('disk', 'rb').read(4096)"
        );
        place.must("/usr/bin/python3", &["-c", &script]);
    }
    let pem = format!("--tls-certificates={folder}");
    let psk = format!("--tls-psk={keys}");
    for (words, uri) in [
        (["--tls=require", &pem, "--tls-verify-peer"], &certificates),
        (["--tls=require", &psk, "-r"], &ours),
    ] {
        let mut all = vec!["-f", "-U", &socket];
        all.extend(words);
        all.extend(["file", "disk"]);
        let _server = place.serve("s", "nbdkit", &all);
        place.must(
            "our qemu-img",
            &["convert", "-f", "raw", "-O", "raw", uri, "copy"],
        );
        assert!(place.read("copy") == bytes, "{uri}");
    }
}

/// A cold start would take twice as long with OpenSSL (see `library.rs` of `vellum-tls`).
#[test]
#[cfg(target_env = "gnu")]
fn openssl_is_loaded_when_it_is_needed() {
    let program = env!("CARGO_BIN_EXE_vellum");
    let mut command = std::process::Command::new(program);
    let libraries = Said::of(command.env("LD_TRACE_LOADED_OBJECTS", "1")).out;
    assert!(libraries.contains("libc.so"), "{libraries}");
    for name in ["libssl", "libcrypto"] {
        assert!(!libraries.contains(name), "{libraries}");
    }
}

//! Certificates, names and passwords.

use super::Place;
use super::server::Nginx;
use std::process::Command;

use vellum_testing::Said;

/// A certificate of a name that has signed itself, with its key: `NAME.pem`, `NAME.key`.
fn certificate(place: &Place, name: &str) {
    let path = |end: &str| place.path(&format!("{name}.{end}")).display().to_string();
    let made = Said::of(Command::new("openssl").args([
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-addext",
        "basicConstraints=critical,CA:FALSE",
        "-keyout",
        &path("key"),
        "-out",
        &path("pem"),
    ]));
    assert!((made.code == Some(0)), "{}", made.err);
}

/// A server that shows a certificate which nobody has signed but itself; `more` goes into its
/// configuration.
pub fn secure_nginx(place: &Place, more: &str) -> Nginx {
    certificate(place, "server");
    let file = |name: &str| place.path(name).display().to_string();
    let more = format!(
        "ssl_certificate {};\nssl_certificate_key {};\n{more}",
        file("server.pem"),
        file("server.key")
    );
    Nginx::start_as(place, " ssl", &more)
}

#[test]
fn a_server_has_to_prove_who_it_is() {
    let place = Place::with_disk();
    let nginx = secure_nginx(&place, "");
    certificate(&place, "client");
    let file = |name: &str| place.path(name).display().to_string();
    let disk = format!("https://127.0.0.1:{}/disk.qcow2", nginx.port);
    let error = place.run("our qemu-img", &["info", &disk]);
    assert_eq!(error.code, Some(1));
    assert!(error.err.contains("certificate"), "{}", error.err);

    let open = format!("driver=qcow2,file.driver=https,file.url={disk},file.sslverify=off");
    let said = place.must("our qemu-img", &["info", "--image-opts", &open]);
    assert!(
        said.contains("virtual size: 64 MiB") && said.starts_with("image: json:{"),
        "{said}"
    );
    place.same("qemu-img", &["info", "--image-opts", &open]);
    place.same("qemu-img", &["compare", "--image-opts", &open, &open]);

    let trusted = format!(
        "driver=qcow2,file.driver=https,file.url={disk},file.tls-ca-file={}",
        file("server.pem")
    );
    let raw = "driver=raw,file.filename=www/disk.raw";
    place.must("our qemu-img", &["compare", "--image-opts", &trusted, raw]);
    let wrong = trusted.replace("server.pem", "client.pem");
    assert_eq!(
        place
            .run("our qemu-img", &["info", "--image-opts", &wrong])
            .code,
        Some(1)
    );

    // The other way round.
    let client = file("client.pem");
    let more = format!("ssl_verify_client on;\nssl_client_certificate {client};\n");
    let nginx = secure_nginx(&place, &more);
    let disk = format!("https://127.0.0.1:{}/disk.qcow2", nginx.port);
    let open = format!("driver=qcow2,file.driver=https,file.url={disk},file.sslverify=off");
    assert_eq!(
        place
            .run("our qemu-img", &["info", "--image-opts", &open])
            .code,
        Some(1)
    );
    let shown = format!(
        "{open},file.tls-cert-file={},file.tls-key-file={}",
        file("client.pem"),
        file("client.key")
    );
    place.must("our qemu-img", &["compare", "--image-opts", &shown, raw]);
}

#[test]
fn a_user_has_a_name_and_a_password() {
    let place = Place::with_disk();
    place.write("users", "me:{PLAIN}secret\n");
    let users = place.name("users");
    let more = format!("auth_basic here;\nauth_basic_user_file {users};\n");
    let nginx = Nginx::start(&place, &more);
    let disk = nginx.url("disk.qcow2");
    let error = place.run("our qemu-img", &["info", &disk]);
    assert!(
        error.err.contains("401: the server wants to know who asks"),
        "{}",
        error.err
    );
    let options = format!(
        "driver=qcow2,file.driver=http,file.url={disk},file.username=me,file.password-secret=s"
    );
    for program in ["qemu-img", "our qemu-img"] {
        let said = place.must(
            program,
            &[
                "info",
                "--object",
                "secret,id=s,data=secret",
                "--image-opts",
                &options,
            ],
        );
        assert!(said.contains("virtual size: 64 MiB"), "{said}");
    }
    let wrong = place.run(
        "our qemu-img",
        &[
            "info",
            "--object",
            "secret,id=s,data=wrong",
            "--image-opts",
            &options,
        ],
    );
    assert!(wrong.err.contains("returned error: 401"), "{}", wrong.err);
    let inside = disk.replace("http://", "http://me:secret@");
    place.must("our qemu-img", &["check", &inside]);
}

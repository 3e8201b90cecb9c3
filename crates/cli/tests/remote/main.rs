//! Images on real servers. On a web server (nginx): `qemu-img`, `qemu-io` and `qemu-nbd` of ours
//! beside the real ones with their curl driver. In an object store (versitygw), also behind a proxy that
//! does wrong what it can, and through a cache.

mod cached;
mod faults;
mod gateway;
mod objects;
#[path = "../nbd_client/place.rs"]
mod place;
mod repository;
mod secure;
mod server;
mod speed;

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use vellum_testing::{Running, until};

use place::Place;
use server::Nginx;

impl Place {
    /// One whose folder `www` a server can read.
    fn with_www() -> Self {
        let place = Place::new();
        // The server may run as somebody who may do less.
        Command::new("chmod")
            .arg("755")
            .arg(place.root())
            .status()
            .expect("chmod");
        fs::create_dir(place.path("www")).expect("a folder");
        place
    }

    /// With `www/disk.qcow2` of 64 MiB, and `www/disk.raw` with what it shows.
    pub fn with_disk() -> Self {
        let place = Place::with_www();
        place.img("create -q -f qcow2 www/disk.qcow2 64M");
        place.io(
            "www/disk.qcow2",
            &["write -P 1 0 5M", "write -P 2 20M 3M", "write -z 30M 1M"],
        );
        place.img("convert -O raw www/disk.qcow2 www/disk.raw");
        place
    }

    /// Has our `qemu-nbd` serve an image, to be read; where to find it.
    fn serve(&self, format: &str, image: &str) -> (Running, String) {
        let socket = self.name("socket");
        let child = Command::new(self.own("qemu-nbd"))
            .args(["-r", "-t", "-f", format, "-k", &socket, image])
            .stdout(Stdio::null())
            .stderr(fs::File::create(self.path("server.log")).expect("a file"))
            .spawn();
        let server = Running {
            child: child.expect("our qemu-nbd"),
        };
        until("a socket", || self.has("socket"));
        (server, format!("nbd+unix://?socket={socket}"))
    }

    /// Runs ours and theirs, which must say the same and end alike.
    fn same(&self, program: &str, words: &[&str]) {
        let theirs = self.run(program, words);
        let ours = self.run(&format!("our {program}"), words);
        assert_eq!(ours, theirs, "{program} {words:?}");
    }

    fn assert_equal(&self, one: &str, other: &str) {
        let read = |name: &str| self.read(name);
        assert!(read(one) == read(other), "{one} and {other} differ");
    }
}

#[test]
fn images_are_told_copied_and_compared_as_qemus_tools_do() {
    let place = Place::with_disk();
    let nginx = Nginx::start(&place, "");
    let (disk, raw) = (nginx.url("disk.qcow2"), nginx.url("disk.raw"));
    for words in [
        &["info", &disk][..],
        &["info", "--output=json", &disk],
        &["info", &raw],
        &["map", &disk],
        &["map", "--output=json", &disk],
        &["map", "--output=json", "-f", "raw", &raw],
        &["check", &disk],
        &["measure", "-O", "qcow2", &disk],
        &["compare", "-f", "qcow2", "-F", "raw", &disk, &raw],
        &["compare", "-f", "qcow2", "-F", "raw", &disk, "www/disk.raw"],
        &["resize", &disk, "65M"],
        &["amend", "-f", "qcow2", "-o", "lazy_refcounts=on", &disk],
        &["snapshot", "-l", &disk],
    ] {
        place.same("qemu-img", words);
    }
    // With several requests at once, theirs waits for ever (QEMU 10.0.2).
    for (program, to, requests) in [("qemu-img", "theirs", "1"), ("our qemu-img", "ours", "8")] {
        let convert = ["convert", "-m", requests, "-O", "raw"];
        place.must(program, &[&convert[..], &[&disk, to]].concat());
        place.assert_equal(to, "www/disk.raw");
        place.must(program, &[&convert[..], &["-f", "raw", &raw, to]].concat());
        place.assert_equal(to, "www/disk.raw");
    }
    place.same(
        "qemu-io",
        &[
            "-r",
            "-c",
            "length",
            "-c",
            "read -q -P 2 20M 64k",
            "-c",
            "map",
            &disk,
        ],
    );
    place.same("qemu-io", &["-c", "read 0 512", &disk]);
    place.same("qemu-io", &["-r", "-f", "raw", "-c", "info", &raw]);
}

#[test]
fn an_overlay_stands_on_a_web_server() {
    let place = Place::with_disk();
    let nginx = Nginx::start(&place, "");
    let disk = nginx.url("disk.qcow2");
    for (program, name) in [("qemu-img", "theirs"), ("our qemu-img", "ours")] {
        let made = place.must(
            program,
            &["create", "-f", "qcow2", "-b", &disk, "-F", "qcow2", name],
        );
        assert!(made.contains(&format!("backing_file={disk}")), "{made}");
    }
    for name in ["theirs", "ours"] {
        place.same("qemu-img", &["info", "--backing-chain", name]);
        place.same("qemu-img", &["map", "--output=json", name]);
    }
    place.io_by(
        "our qemu-io",
        "ours",
        &["write -P 9 1M 70k", "read -P 1 0 1M"],
    );
    place.io("ours", &["read -P 9 1M 70k", "read -P 2 20M 3M"]);
    // The file itself was not touched: nobody could.
    place.must("our qemu-img", "rebase -b '' ours");
    drop(nginx);
    place.io("ours", &["read -P 9 1M 70k", "read -P 2 20M 3M"]);
    let error = place.run("our qemu-img", "info --backing-chain theirs");
    assert!(
        error.err.contains("Failed to connect: Connection refused"),
        "{}",
        error.err
    );
}

#[test]
fn names_and_options_are_qemus() {
    let place = Place::with_disk();
    let nginx = Nginx::start(&place, "");
    let disk = nginx.url("disk.qcow2");
    for options in [
        format!("driver=http,url={disk},readahead=1"),
        format!("driver=http,url={disk},timeout=10001"),
        format!("driver=http,url={disk},sslverify=foo"),
        format!("driver=http,url={disk},cookie=a,cookie-secret=b"),
        format!("driver=http,url={disk},password-secret=nobody"),
        format!("driver=http,url={disk},proxy-password-secret=nobody"),
        format!("driver=https,url={disk}"),
        format!("driver=http,filename={disk}"),
        "driver=http".to_owned(),
        format!("driver=qcow2,file.driver=http,file.url={disk},file.readahead=512"),
        format!("driver=qcow2,file.driver=http,file.url={disk},file.timeout=7"),
    ] {
        place.same("qemu-img", &["info", "--image-opts", &options]);
    }
    place.same("qemu-img", &["info", "http:foo"]);
    let json = format!(r#"json:{{"driver":"qcow2","file":{{"driver":"http","url":"{disk}"}}}}"#);
    place.same("qemu-img", &["info", &json]);
    place.same(
        "qemu-img",
        &["info", "--object", "secret,id=s,data=x", &json],
    );
    // What a name cannot say is told as QEMU tells it, but for the order of the keys.
    let options = format!("driver=qcow2,file.driver=http,file.url={disk},file.cookie=a=b");
    let said = place.must("our qemu-img", &["info", "--image-opts", &options]);
    assert!(said.starts_with("image: json:{"), "{said}");
    assert!(said.contains(r#""cookie": "a=b""#), "{said}");
    let error = place.run("our qemu-img", &["info", &nginx.url("nothing")]);
    let wanted = format!(
        "qemu-img: Could not open '{0}': Error opening file: The requested URL returned error: \
         404: there is no such file on the server\n",
        nginx.url("nothing")
    );
    assert_eq!(error.err, wanted);
    let error = place.run(
        "our qemu-img",
        &["convert", "-O", "qcow2", "www/disk.raw", &disk],
    );
    assert_eq!(error.code, Some(1));
    assert!(
        error
            .err
            .contains("Protocol driver 'http' does not support image creation"),
        "{}",
        error.err
    );
    for format in ["raw", "qcow2"] {
        place.same(
            "qemu-img",
            &["create", "-f", format, &nginx.url("new"), "1M"],
        );
    }
}

#[test]
fn servers_without_ranges_are_read_once() {
    let place = Place::with_disk();
    let nginx = Nginx::start(&place, "max_ranges 0;");
    let disk = nginx.url("disk.qcow2");
    let theirs = place.run("qemu-img", &["info", &disk]);
    assert!(
        theirs.err.contains("Server does not support 'range'"),
        "{}",
        theirs.err
    );
    let ours = place.run("our qemu-img", &["convert", "-O", "raw", &disk, "copy"]);
    assert_eq!(ours.code, Some(0), "{}", ours.err);
    assert!(
        ours.err.contains("the server knows no ranges; copying"),
        "{}",
        ours.err
    );
    place.assert_equal("copy", "www/disk.raw");
}

#[test]
fn a_disk_on_a_web_server_is_served_on() {
    let place = Place::with_disk();
    let nginx = Nginx::start(&place, "");
    let (_server, export) = place.serve("qcow2", &nginx.url("disk.qcow2"));
    let said = place.img(&["compare", "-f", "raw", "-F", "raw", &export, "www/disk.raw"]);
    assert_eq!(said, "Images are identical.\n");
}

#[test]
fn the_file_must_stay_what_it_is() {
    let place = Place::with_disk();
    let nginx = Nginx::start(&place, "");
    let (_server, export) = place.serve("raw", &nginx.url("disk.raw"));
    place.must(
        "qemu-io",
        &["-r", "-f", "raw", "-c", "read -P 1 0 64k", &export],
    );
    place.write("www/new", vec![7; 64 << 20]);
    // nginx's entity tag is made of length and second.
    let file = fs::File::options().write(true).open(place.path("www/new"));
    let other = SystemTime::now() - Duration::from_secs(100);
    file.and_then(|file| file.set_modified(other))
        .expect("a file");
    fs::rename(place.path("www/new"), place.path("www/disk.raw")).expect("a file");
    let said = place.run(
        "qemu-io",
        &["-r", "-f", "raw", "-c", "read -P 2 20M 64k", &export],
    );
    assert!((said.out + &said.err).contains("read failed: Input/output error"));
    // Clients get a number; why it failed the server says.
    let log = place.text("server.log");
    let reason = "the file has changed on the server since it was opened";
    assert!(log.contains(reason), "{log}");
}

#[test]
fn passwords_in_urls_are_not_told() {
    let place = Place::with_disk();
    let server = Nginx::start(&place, "location /denied { return 403; }");
    let tell = |path: &str, words: &[&str]| {
        let url = format!("http://me:secret@127.0.0.1:{}/{path}", server.port);
        let json = format!(r#"json:{{"driver":"qcow2","file":{{"driver":"http","url":"{url}"}}}}"#);
        for name in [url, json] {
            let told = place.run("our qemu-img", &[words, &[&name]].concat());
            let told = told.out + &told.err;
            assert!(told.contains("me:***@127.0.0.1"), "{told}");
            assert!(!told.contains("secret"), "{told}");
        }
    };
    tell("disk.qcow2", &["info"]);
    tell("disk.qcow2", &["info", "--output=json"]);
    tell("denied", &["info"]);
    tell("denied", &["check"]);
}

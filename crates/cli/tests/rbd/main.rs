//! Images on a Ceph cluster: our programs beside the real ones with their driver, and Ceph's tool.
//!
//! What needs no keys is one test, since a cluster takes ten seconds to start.

mod ceph;
mod keys;
#[path = "../nbd_client/place.rs"]
mod place;

use std::fs;
use std::io::Write;
use std::process::{Child, Command, Stdio};

use vellum_testing::until;

use ceph::{Access, Ceph};
use place::Place;

#[test]
fn images_lie_on_ceph() {
    let place = Place::new();
    let write = [
        "-c",
        "write -P 1 0 5M",
        "-c",
        "write -P 2 20M 3M",
        "disk.qcow2",
    ];
    place.img("create -q -f qcow2 disk.qcow2 64M");
    place.must("qemu-io", &write);
    place.img("convert -O raw disk.qcow2 disk.raw");
    let ceph = Ceph::start(&place, Access::Everybody);
    images_are_copied_both_ways(&place, &ceph);
    what_is_written_is_what_is_read(&place, &ceph);
    holes_are_told_as_qemu_tells_them(&place, &ceph);
    images_are_made_and_resized(&place, &ceph);
    a_disk_that_grows_is_as_long_as_it_should_be(&place, &ceph);
    snapshots_and_namespaces_are_read(&place, &ceph);
    names_and_options_are_qemus(&place, &ceph);
    what_is_not_there_is_told(&place, &ceph);
    what_librbd_encrypts_is_read(&place, &ceph);
    a_disk_is_served_on(&place, &ceph);
    the_daemon_makes_images(&place, &ceph);
    snapshots_are_cached_and_images_are_not(&place, &ceph);
}

/// Has our `qemu-nbd` serve an image; where to find it.
fn serve(place: &Place, words: &[&str]) -> (Child, String) {
    let socket = place.name("socket");
    let server = Command::new(place.own("qemu-nbd"))
        .args(["-k", &socket])
        .args(words)
        .current_dir(place.root())
        .stdout(Stdio::null())
        .spawn();
    let server = server.expect("our qemu-nbd");
    until("a socket", || place.has("socket"));
    (server, format!("nbd+unix://?socket={socket}"))
}

fn images_are_copied_both_ways(place: &Place, ceph: &Ceph) {
    let disk = place.read("disk.raw");
    for format in ["raw", "qcow2"] {
        let far = ceph.name(format);
        place.must(
            "our qemu-img",
            &["convert", "-O", format, "disk.qcow2", &far],
        );
        for program in ["qemu-img", "our qemu-img"] {
            let compare = ["compare", "-F", format, "disk.qcow2", &far];
            assert_eq!(place.must(program, &compare), "Images are identical.\n");
        }
        place.must(
            "our qemu-img",
            &["convert", "-f", format, "-O", "raw", &far, "back"],
        );
        assert!(place.read("back") == disk);
    }
    assert!(ceph.content(place, "raw") == disk);
    place.img(&["check", "-q", &ceph.name("qcow2")]);
    let error = place.run(
        "our qemu-img",
        &["convert", "disk.qcow2", &ceph.name("raw")],
    );
    assert!(
        error.err.contains("error rbd create: File exists"),
        "{}",
        error.err
    );
    place.must(
        "our qemu-img",
        &["convert", "-n", "disk.qcow2", &ceph.name("raw")],
    );
    assert!(ceph.content(place, "raw") == disk);
}

fn what_is_written_is_what_is_read(place: &Place, ceph: &Ceph) {
    let far = ceph.name("raw");
    let mut model = place.read("disk.raw");
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..4 {
        let mut words = vec!["-f", "raw", "-d", "unmap", &far]
            .into_iter()
            .map(str::to_owned);
        let mut words: Vec<String> = words.by_ref().collect();
        for _ in 0..40 {
            let at = random.usize(..model.len() - (6 << 20)) & !511;
            let len = (1 + random.usize(..10_000)) << 9;
            let byte = random.u8(1..);
            let (word, byte) = match random.u8(..5) {
                0 => (format!("read {at} {len}"), None),
                1 => (format!("write -z {at} {len}"), Some(0)),
                2 => (format!("write -z -u {at} {len}"), Some(0)),
                3 => (
                    format!("aio_write -P {byte} {at} {len}\naio_flush"),
                    Some(byte),
                ),
                _ => (format!("write -f -P {byte} {at} {len}"), Some(byte)),
            };
            for one in word.split('\n') {
                words.extend(["-c".to_owned(), one.to_owned()]);
            }
            if let Some(byte) = byte {
                model[at..at + len].fill(byte);
            }
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let said = place.must("our qemu-io", &words);
        assert!(!said.contains("failed"), "{said}");
        assert!(ceph.content(place, "raw") == model);
        place.must(
            "our qemu-img",
            &["convert", "-f", "raw", "-O", "raw", &far, "copy"],
        );
        assert!(place.read("copy") == model);
    }
    // A whole object that is given back reads as zeroes.
    let words = [
        "-f",
        "raw",
        "-d",
        "unmap",
        "-c",
        "discard 8M 4M",
        "-c",
        "read -P 0 8M 4M",
        &far,
    ];
    let said = place.must("our qemu-io", &words);
    assert!(!said.contains("failed"), "{said}");
}

fn holes_are_told_as_qemu_tells_them(place: &Place, ceph: &Ceph) {
    ceph.rbd(&["create", "--size", "103M", "holes"]);
    let far = ceph.name("holes");
    for at in ["0", "11M", "17M", "40M", "44M", "102M"] {
        place.must(
            "our qemu-io",
            &["-f", "raw", "-c", &format!("write -P 1 {at} 4k"), &far],
        );
    }
    let map = ["map", "--output=json", "-f", "raw", &far];
    let theirs = place.img(&map);
    assert!(theirs.contains("\"data\": false"), "{theirs}");
    assert_eq!(place.must("our qemu-img", &map), theirs);
    // What the same program writes is told at once.
    let (mut server, export) = serve(place, &["-t", "-f", "raw", &far]);
    let map = |place: &Place| place.img(&["map", "--output=json", "-f", "raw", &export]);
    let before = map(place);
    place.must("qemu-io", &["-f", "raw", "-c", "write 60M 4k", &export]);
    let after = map(place);
    assert_eq!(
        before.matches("\"data\": true").count() + 1,
        after.matches("\"data\": true").count()
    );
    // One that is killed leaves a lock on the image behind, for half a minute.
    let pid = rustix::process::Pid::from_child(&server);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("our qemu-nbd");
    assert!(server.wait().expect("our qemu-nbd").success());
    // Clones are not told truly by every version of the library, so all of theirs may be data.
    ceph.rbd(&["snap", "create", "holes@s"]);
    ceph.rbd(&["snap", "protect", "holes@s"]);
    ceph.rbd(&["clone", "holes@s", "clone"]);
    place.must(
        "our qemu-io",
        &["-f", "raw", "-c", "write -P 4 50M 1M", &ceph.name("clone")],
    );
    let convert = [
        "convert",
        "-f",
        "raw",
        "-O",
        "raw",
        &ceph.name("clone"),
        "clone.raw",
    ];
    place.must("our qemu-img", &convert);
    assert!(ceph.content(place, "clone") == place.read("clone.raw"));
}

fn images_are_made_and_resized(place: &Place, ceph: &Ceph) {
    let far = ceph.name("made");
    let words = ["create", "-f", "raw", "-o", "cluster_size=64k", &far, "10M"];
    place.must("our qemu-img", &words);
    let told = ceph.rbd(&["info", "made"]);
    assert!(told.contains("order 16 (64 KiB objects)"), "{told}");
    let odd = [
        "create",
        "-f",
        "raw",
        "-o",
        "cluster_size=65000",
        &ceph.name("odd"),
        "10M",
    ];
    assert_eq!(place.run("our qemu-img", &odd).code, Some(1));
    place.must(
        "our qemu-io",
        &["-f", "raw", "-c", "write -P 3 0 10M", &far],
    );
    place.must("our qemu-img", &["resize", "-f", "raw", &far, "12M"]);
    assert_eq!(ceph.content(place, "made").len(), 12 << 20);
    place.must(
        "our qemu-img",
        &["resize", "-f", "raw", "--shrink", &far, "9M"],
    );
    place.must("our qemu-img", &["resize", "-f", "raw", &far, "+1M"]);
    let mut wanted = vec![3; 9 << 20];
    wanted.resize(10 << 20, 0);
    assert!(ceph.content(place, "made") == wanted);
    let beyond = place.run("our qemu-io", &["-f", "raw", "-c", "write 10M 512", &far]);
    assert!(!beyond.out.contains("wrote"), "{}", beyond.out);
    let help = place.must("our qemu-img", &["create", "-f", "raw", "-o", "help", &far]);
    assert!(help.contains("RBD object size"), "{help}");
}

fn a_disk_that_grows_is_as_long_as_it_should_be(place: &Place, ceph: &Ceph) {
    let far = ceph.name("grown");
    place.must("our qemu-img", &["create", "-q", "-f", "qcow2", &far, "1G"]);
    place.must(
        "our qemu-io",
        &["-c", "write -P 5 7M 9M", "-c", "write -P 6 500M 30M", &far],
    );
    place.img(&["check", "-q", &far]);
    let words = [
        "-r",
        "-c",
        "read -P 5 7M 9M",
        "-c",
        "read -P 6 500M 30M",
        &far,
    ];
    let said = place.must("qemu-io", &words);
    assert!(!said.contains("failed"), "{said}");
    let len = ceph.content(place, "grown").len();
    assert!((39 << 20..42 << 20).contains(&len), "{len}");
}

fn snapshots_and_namespaces_are_read(place: &Place, ceph: &Ceph) {
    ceph.rbd(&["snap", "create", "made@before"]);
    place.must(
        "our qemu-io",
        &["-f", "raw", "-c", "write -P 9 0 1M", &ceph.name("made")],
    );
    let before = ceph.name("made@before");
    let read = ["-r", "-f", "raw", "-c", "read -P 3 0 1M", &before];
    let said = place.must("our qemu-io", &read);
    assert!(!said.contains("failed"), "{said}");
    let error = place.run("our qemu-io", &["-f", "raw", "-c", "write 0 512", &before]);
    assert!(
        error.err.contains("rbd snapshots are read-only"),
        "{}",
        error.err
    );
    ceph.rbd(&["namespace", "create", "rbd/space"]);
    let far = ceph.name("space/disk");
    place.must("our qemu-img", &["convert", "disk.qcow2", &far]);
    assert_eq!(ceph.rbd(&["ls", "rbd/space"]), "disk\n");
    let compare = ["compare", "-F", "raw", "disk.qcow2", &far];
    assert_eq!(place.img(&compare), "Images are identical.\n");
}

fn names_and_options_are_qemus(place: &Place, ceph: &Ceph) {
    let conf = &ceph.conf;
    let port = ceph.monitor_port;
    for options in [
        format!("driver=raw,file.driver=rbd,file.pool=rbd,file.image=raw,file.conf={conf}"),
        format!(
            "driver=raw,file.driver=rbd,file.pool=rbd,file.image=made,file.snapshot=before,\
             file.conf={conf},file.user=admin"
        ),
        format!(
            "driver=rbd,pool=rbd,image=raw,server.0.host=127.0.0.1,server.0.port={port},\
             auth-client-required.0=none"
        ),
        format!("driver=rbd,pool=rbd,namespace=space,image=disk,conf={conf}"),
    ] {
        let info = ["info", "--output=json", "-U", "--image-opts", &options];
        let size = |program: &str| {
            let said = place.must(program, &info);
            let line = said.lines().find(|line| line.contains("virtual-size"));
            line.map(str::to_owned).expect("a size")
        };
        assert_eq!(size("our qemu-img"), size("qemu-img"), "{options}");
    }
    let far = ceph.name("raw");
    let said = place.must("our qemu-img", &["info", "-f", "raw", &far]);
    assert!(
        said.starts_with(&format!("image: {far}\nfile format: raw\n")),
        "{said}"
    );
    let json = format!(
        r#"json:{{"driver":"raw","file":{{"driver":"rbd","pool":"rbd","image":"raw","conf":"{conf}"}}}}"#
    );
    let said = place.must("our qemu-img", &["info", &json]);
    assert!(said.contains("virtual size: 64 MiB"), "{said}");
    for options in ["driver=rbd,image=raw", "driver=rbd,pool=rbd"] {
        let info = ["info", "--image-opts", options];
        let (ours, theirs) = (
            place.run("our qemu-img", &info),
            place.run("qemu-img", &info),
        );
        assert_eq!(ours.err, theirs.err);
    }
}

fn what_is_not_there_is_told(place: &Place, ceph: &Ceph) {
    let conf = &ceph.conf;
    for (name, wanted) in [
        (
            ceph.name("nothing"),
            "error reading header from nothing: No such file",
        ),
        (
            ceph.name("made@nothing"),
            "error reading header from made@nothing: No such file",
        ),
        (
            format!("rbd:nopool/x:conf={conf}"),
            "error opening pool nopool: No such file",
        ),
        (
            "rbd:rbd/x:conf=/nowhere".to_owned(),
            "error reading conf file /nowhere: No such file",
        ),
        (
            format!("rbd:rbd/x:conf={conf}:nonsense=1"),
            "invalid conf option nonsense",
        ),
        // Nobody listens there.
        (
            "rbd:rbd/x:conf=/dev/null:auth_client_required=none:mon_host=127.0.0.1\\:1:\
             client_mount_timeout=2"
                .to_owned(),
            "error connecting: Connection timed out",
        ),
    ] {
        let said = place.run("our qemu-img", &["info", "-f", "raw", &name]);
        assert_eq!(said.code, Some(1), "{name}");
        assert!(said.err.contains(wanted), "{name}: {}", said.err);
    }
}

fn what_librbd_encrypts_is_read(place: &Place, ceph: &Ceph) {
    place.write("pass", "hidden");
    let pass = place.name("pass");
    ceph.rbd(&["create", "--size", "64M", "secret"]);
    ceph.rbd(&["encryption", "format", "secret", "luks1", &pass]);
    let options = |format: &str| {
        format!(
            "driver=rbd,pool=rbd,image=secret,conf={},encrypt.format={format},\
             encrypt.key-secret=s",
            ceph.conf
        )
    };
    let object = ["--object", "secret,id=s,data=hidden"];
    let io = ["--image-opts", &options("luks"), "-c", "write -P 7 1M 3M"];
    place.must("our qemu-io", &[&object[..], &io].concat());
    let io = [
        "--image-opts",
        &options("luks"),
        "-c",
        "read -P 7 1M 3M",
        "-c",
        "read -P 0 0 1M",
    ];
    let said = place.must("qemu-io", &[&object[..], &io].concat());
    assert!(!said.contains("failed"), "{said}");
    let wrong = ["--object", "secret,id=s,data=wrong"];
    let said = place.run("our qemu-io", &[&wrong[..], &io].concat());
    assert!(
        said.err.contains("error loading the image's encryption"),
        "{}",
        said.err
    );
    let wrong = ["info", "--image-opts", &options("luks-any")];
    let said = place.run(
        "our qemu-img",
        &[&["info"], &object[..], &wrong[1..]].concat(),
    );
    assert!(said.err.contains("say luks or luks2"), "{}", said.err);
}

fn a_disk_is_served_on(place: &Place, ceph: &Ceph) {
    let far = ceph.name("qcow2");
    let made = [
        "create", "-q", "-f", "qcow2", "-b", &far, "-F", "qcow2", "over",
    ];
    place.must("our qemu-img", &made);
    let (mut server, export) = serve(place, &["-f", "qcow2", "over"]);
    let words = [
        "-f",
        "raw",
        "-c",
        "read -P 1 0 5M",
        "-c",
        "write -P 9 1M 70k",
        &export,
    ];
    let said = place.must("qemu-io", &words);
    assert!(!said.contains("failed"), "{said}");
    // It ends with its only client.
    assert!(server.wait().expect("our qemu-nbd").success());
    let words = ["-c", "read -P 9 1M 70k", "-c", "read -P 2 20M 3M", "over"];
    let said = place.must("qemu-io", &words);
    assert!(!said.contains("failed"), "{said}");
}

fn the_daemon_makes_images(place: &Place, ceph: &Ceph) {
    let program = place.own("qemu-storage-daemon");
    let location = |image: &str| {
        let conf = &ceph.conf;
        format!(r#"{{"pool": "rbd", "image": "{image}", "conf": "{conf}"}}"#)
    };
    let text = format!(
        r#"{{"execute": "qmp_capabilities"}}
{{"execute": "blockdev-create", "arguments": {{"job-id": "j", "options": {{"driver": "rbd", "location": {}, "size": 8388608, "cluster-size": 1048576}}}}}}
"#,
        location("daemon")
    );
    let daemon = Command::new(&program)
        .args(["--chardev", "stdio,id=c", "--monitor", "chardev=c"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut daemon = daemon.expect("our daemon");
    let mut input = daemon.stdin.take().expect("a pipe");
    input.write_all(text.as_bytes()).expect("a pipe");
    until("a image", || ceph.rbd(&["ls"]).contains("daemon"));
    input
        .write_all(b"{\"execute\": \"quit\"}\n")
        .expect("a pipe");
    let done = daemon.wait_with_output().expect("our daemon");
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(!said.contains("\"error\""), "{said}");
    let told = ceph.rbd(&["info", "daemon"]);
    assert!(
        told.contains("size 8 MiB") && told.contains("order 20"),
        "{told}"
    );
}

/// The node of an image behind the cache `cache`; `more` goes into the cache's options.
fn cached(ceph: &Ceph, image: &str, more: &str) -> String {
    let conf = &ceph.conf;
    let snapshot = image.split_once('@');
    let (image, snapshot) = match snapshot {
        Some((image, snapshot)) => (image, format!(r#","snapshot":"{snapshot}""#)),
        None => (image, String::new()),
    };
    format!(
        r#"json:{{"driver":"raw","file":{{"driver":"cache","directory":"cache",{more}"file":{{"driver":"rbd","pool":"rbd","image":"{image}"{snapshot},"conf":"{conf}"}}}}}}"#
    )
}

/// Nothing tells versions of an image apart that is written to, and a snapshot is one for ever.
fn snapshots_are_cached_and_images_are_not(place: &Place, ceph: &Ceph) {
    use std::os::unix::fs::DirBuilderExt;
    let mut folder = fs::DirBuilder::new();
    let made = folder.mode(0o700).create(place.path("cache"));
    made.expect("a folder");
    let versions = || {
        let files = fs::read_dir(place.path("cache")).expect("a folder");
        let files = files.map(|file| file.expect("a file").path());
        files
            .filter(|path| path.extension().is_some_and(|end| end == "index"))
            .count()
    };
    let snapshot = cached(ceph, "golden@v1", "");
    for pattern in [3, 4] {
        // Another image under the same names.
        ceph.rbd(&["create", "--size", "8M", "golden"]);
        let write = format!("write -q -P {pattern} 0 8M");
        let far = ceph.name("golden");
        place.must("our qemu-io", &["-f", "raw", "-c", &write, &far]);
        ceph.rbd(&["snap", "create", "--no-progress", "golden@v1"]);
        place.must(
            "our qemu-io",
            &["-f", "raw", "-c", "write -q -P 9 0 8M", &far],
        );
        let read = format!("read -P {pattern} 0 8M");
        for _ in 0..2 {
            let words = ["-r", "-c", &read, &snapshot];
            let said = place.must("our qemu-io", &words);
            assert!(!said.contains("failed"), "{said}");
        }
        ceph.rbd(&["snap", "purge", "--no-progress", "golden"]);
        ceph.rbd(&["rm", "--no-progress", "golden"]);
    }
    assert_eq!(versions(), 2);
    // An image itself has one if the user says which.
    let image = cached(ceph, "raw", "");
    let said = place.run("our qemu-img", &["info", &image]);
    assert_eq!(said.code, Some(1));
    assert!(said.err.contains("rbd:POOL/IMAGE@SNAPSHOT"), "{}", said.err);
    let named = cached(ceph, "raw", r#""version":"of today","#);
    place.must("our qemu-io", &["-r", "-c", "read 0 1M", &named]);
    assert_eq!(versions(), 3);
}

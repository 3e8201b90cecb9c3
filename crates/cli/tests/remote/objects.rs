//! Images in an object store: read, put there, refused.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use vellum_testing::Said;

use super::gateway::{Gateway, KEY, SECRET};
use super::place::Place;

const GOLDEN: &str = "s3://images/golden.qcow2";

impl Place {
    /// Runs a command of ours with the environment of a store.
    pub fn vellum(&self, gateway: &Gateway, words: &[&str]) -> Said {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
        command.args(words).current_dir(self.root());
        command.envs(gateway.environment());
        Said::of(&mut command)
    }

    /// The same, which must succeed.
    pub fn fine(&self, gateway: &Gateway, words: &[&str]) -> String {
        let said = self.vellum(gateway, words);
        assert_eq!(said.code, Some(0), "{words:?}: {}", said.err);
        said.out
    }

    fn refused(&self, gateway: &Gateway, words: &[&str], message: &str) {
        let said = self.vellum(gateway, words);
        assert_eq!(said.code, Some(1), "{words:?}: {}", said.out);
        assert!(said.err.contains(message), "{words:?}: {}", said.err);
        assert_eq!(said.err.lines().count(), 1, "{}", said.err);
    }
}

#[test]
fn images_are_put_there_and_read() {
    let place = Place::with_disk();
    let gateway = Gateway::start(&place);
    let disk = "www/disk.qcow2";
    // One request, several parts, and compressed.
    for (options, name) in [
        (&["-O", "qcow2", "-c"][..], "s3://images/folder/small.qcow2"),
        (&["-O", "raw"], "s3://images/disk.raw"),
        (&["-O", "qcow2"], GOLDEN),
    ] {
        let said = place.fine(
            &gateway,
            &[&["convert"][..], options, &[disk, name]].concat(),
        );
        assert_eq!(said, "");
        let same = place.fine(&gateway, &["compare", name, disk]);
        assert_eq!(same, "Images are identical.\n");
    }
    // What lies there is what QEMU's programs read.
    place.img("check store/images/golden.qcow2");
    place.img("compare -f raw -F raw store/images/disk.raw www/disk.raw");
    let said = place.fine(&gateway, &["info", GOLDEN]);
    assert!(said.contains("protocol type: s3"), "{said}");
    // As an image with options, whose secrets are objects.
    place.write("secret", SECRET);
    let endpoint = gateway.endpoint();
    let json = format!(
        r#"json:{{"driver":"qcow2","file":{{"driver":"s3","url":"{GOLDEN}","endpoint":"{endpoint}","region":"us-east-1","access-key-id":"{KEY}","access-key-secret":"s"}}}}"#
    );
    let object = "secret,id=s,file=secret";
    place.must("our qemu-img", &["check", "--object", object, &json]);
    let target = json.replace("golden", "second").replace(
        r#"{"driver":"qcow2","file":{"driver":"s3""#,
        r#"{"driver":"s3""#,
    );
    let target = target.strip_suffix('}').expect("a brace");
    let words = [
        "convert", "--object", object, "-p", "-O", "qcow2", &json, target,
    ];
    let said = place.must("our qemu-img", &words);
    assert!(said.contains("(100.00/100%)"), "{said}");
    place.fine(&gateway, &["compare", "s3://images/second.qcow2", disk]);
}

#[test]
fn an_overlay_stands_on_an_object() {
    let place = Place::with_disk();
    let gateway = Gateway::start(&place);
    place.fine(
        &gateway,
        &["convert", "-O", "qcow2", "www/disk.qcow2", GOLDEN],
    );
    place.fine(
        &gateway,
        &["create", "-f", "qcow2", "-b", GOLDEN, "-F", "qcow2", "vm"],
    );
    let write = [
        "io",
        "-c",
        "write -P 9 1M 70k",
        "-c",
        "read -P 2 20M 3M",
        "vm",
    ];
    place.fine(&gateway, &write);
    let said = place.fine(&gateway, &["info", "--backing-chain", "vm"]);
    assert!(
        said.contains(&format!("backing file: {GOLDEN}\n")),
        "{said}"
    );
    place.fine(&gateway, &["rebase", "-b", "", "vm"]);
    drop(gateway);
    place.io("vm", &["read -P 9 1M 70k", "read -P 2 20M 3M"]);
}

#[test]
fn what_cannot_be_is_refused_with_what_to_do() {
    let place = Place::with_disk();
    let gateway = Gateway::start(&place);
    place.fine(
        &gateway,
        &["convert", "-O", "qcow2", "www/disk.qcow2", GOLDEN],
    );
    let missing = "there is no such object, or no such bucket";
    let in_place = "an object cannot be changed in place: make an overlay here ('create -b') and \
                    write to that, or put a whole image there ('convert')";
    for (words, message) in [
        (&["info", "s3://images/nothing"][..], missing),
        (&["info", "s3://nowhere/nothing"], missing),
        (
            &["info", "s3://images"],
            "a key is wanted behind the bucket's name",
        ),
        (&["io", "-c", "write 0 512", GOLDEN], in_place),
        (&["resize", GOLDEN, "65M"], in_place),
        (
            &["create", "-f", "qcow2", "s3://images/new", "1M"],
            "put a whole image there",
        ),
        (
            &["convert", "-n", "-O", "qcow2", "www/disk.qcow2", GOLDEN],
            "An object is made whole: -n has no meaning for it",
        ),
        (
            &["convert", "-O", "qcow2", "www/disk.qcow2", "s3://nowhere/x"],
            "there is no such object, or no such bucket",
        ),
    ] {
        place.refused(&gateway, words, message);
    }
    // Nothing was changed or made.
    let objects = fs::read_dir(place.path("store/images")).expect("a bucket");
    let names: Vec<_> = objects
        .map(|one| one.expect("a file").file_name())
        .collect();
    assert!(!names.iter().any(|name| name == "new"), "{names:?}");
    place.fine(&gateway, &["compare", GOLDEN, "www/disk.qcow2"]);
    for endpoint in ["", "foo", "ftp://host", "http://"] {
        let options = format!("driver=s3,url={GOLDEN},endpoint={endpoint}");
        let words = ["info", "--image-opts", &options];
        place.refused(&gateway, &words, "is no URL of a server");
    }
    // Whoever is not who he says he is, and nobody at all.
    place.write("wrong", "wrong");
    let endpoint = gateway.endpoint();
    let options = |who: &str| {
        format!("driver=qcow2,file.driver=s3,file.url={GOLDEN},file.endpoint={endpoint},{who}")
    };
    let keys = options("file.access-key-id=tester,file.access-key-secret=s");
    for options in [keys, options("file.anonymous=on")] {
        let words = [
            "info",
            "--object",
            "secret,id=s,file=wrong",
            "--image-opts",
            &options,
        ];
        // With the store's own words for it.
        let message = "the store does not let this user do that (";
        place.refused(&gateway, &words, message);
    }
}

#[test]
fn who_has_no_keys_is_told_how_to_name_some() {
    let place = Place::with_disk();
    let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
    command.args(["info", GOLDEN]);
    // Nobody listens there.
    command.env("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1");
    command.env_remove("AWS_ACCESS_KEY_ID");
    let done = command.current_dir(place.root()).output();
    let said = done.expect("vellum info").stderr;
    let said = String::from_utf8_lossy(&said);
    for name in ["AWS_ACCESS_KEY_ID", "'access-key-id'", "no keys are set"] {
        assert!(said.contains(name), "{said}");
    }
}

#[test]
fn an_object_that_is_exchanged_is_never_read_as_two() {
    let place = Place::with_disk();
    let gateway = Gateway::start(&place);
    let raw = "s3://images/disk.raw";
    place.fine(&gateway, &["convert", "-O", "raw", "www/disk.qcow2", raw]);
    let words = ["io", "-r", "-f", "raw", raw];
    let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
    command.args(words).envs(gateway.environment());
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command.stderr(Stdio::piped());
    let mut child = command.spawn().expect("our qemu-io");
    let mut input = child.stdin.take().expect("a pipe");
    let mut say = |line: &str| std::io::Write::write_all(&mut input, line.as_bytes());
    say("read -P 1 0 64k\n").expect("a pipe");
    place.must("our qemu-img", "create -q -f raw other 64M");
    place.fine(&gateway, &["convert", "-O", "raw", "other", raw]);
    say("read 20M 64k\nread 0 512\nquit\n").expect("a pipe");
    drop(input);
    let done = child.wait_with_output().expect("our qemu-io");
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(
        said.contains("read 65536/65536 bytes at offset 0"),
        "{said}"
    );
    assert!(said.contains("read failed: Input/output error"), "{said}");
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    let reason =
        format!("warning: '{raw}': the file has changed on the server since it was opened");
    assert!(said.contains(&reason), "{said}");
}

#[test]
fn an_upload_that_is_killed_shows_nothing() {
    let place = Place::with_disk();
    let gateway = Gateway::start(&place);
    let raw = "s3://images/disk.raw";
    place.fine(&gateway, &["convert", "-O", "raw", "www/disk.qcow2", raw]);
    place.must("our qemu-img", "create -q -f raw other 64M");
    place.io_by("our qemu-io", "-f raw other", &["write -q -P 7 0 64M"]);
    let (mut old, mut new) = (0, 0);
    for after_ms in [20, 60, 100, 150, 200, 300] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
        command.args(["convert", "-q", "-O", "raw", "other", raw]);
        command
            .envs(gateway.environment())
            .current_dir(place.root());
        let mut child = command.spawn().expect("vellum convert");
        std::thread::sleep(Duration::from_millis(after_ms));
        // It may have ended already.
        let _ = child.kill();
        child.wait().expect("an end");
        let is_old = place.vellum(&gateway, &["compare", "-f", "raw", raw, "www/disk.qcow2"]);
        match is_old.code {
            Some(0) => old += 1,
            _ => {
                place.fine(
                    &gateway,
                    &["compare", "-f", "raw", "-F", "raw", raw, "other"],
                );
                new += 1;
                place.fine(&gateway, &["convert", "-O", "raw", "www/disk.qcow2", raw]);
            }
        }
    }
    assert_eq!(old + new, 6);
    assert!(old > 0, "none was killed before its end");
}

//! A cluster that asks for keys (cephx): who has one gets in, and who has none is told what to look at.

use std::fs;

use crate::ceph::{Access, Ceph};
use crate::place::Place;

/// A configuration that names the cluster, and no keyring.
fn bare_configuration(place: &Place, ceph: &Ceph) -> String {
    let text = fs::read_to_string(&ceph.conf).expect("a configuration");
    let kept = text.lines().filter(|line| !line.starts_with("keyring"));
    let kept: Vec<_> = kept.take_while(|line| !line.starts_with("[osd]")).collect();
    let nowhere = place.name("nowhere");
    let bare = place.path("bare.conf");
    fs::write(&bare, kept.join("\n") + &format!("\nkeyring = {nowhere}\n")).expect("a file");
    bare.display().to_string()
}

/// A node of the image by the cluster's configuration, and `who` asks.
fn node(conf: &str, image: &str, who: &str) -> String {
    format!(
        r#"json:{{"driver":"raw","file":{{"driver":"rbd","pool":"rbd","image":"{image}","conf":"{conf}"{who}}}}}"#
    )
}

#[test]
fn who_asks_needs_the_key() {
    let place = Place::new();
    let ceph = Ceph::start(&place, Access::Keys);
    let key = ceph.add_user("vm", "profile rbd pool=rbd");
    ceph.rbd(&["create", "--size", "16M", "disk"]);
    let bare = bare_configuration(&place, &ceph);
    // Ceph tells keys in base64; a secret may be read so.
    place.write("key", &key);
    let object = "secret,id=key,file=key,format=base64";
    let with_key = r#","user":"vm","key-secret":"key""#;
    let disk = node(&bare, "disk", with_key);
    for (program, pattern) in [("our qemu-io", 1), ("qemu-io", 2)] {
        let (write, read) = (
            format!("write -P {pattern} 0 1M"),
            format!("read -P {pattern} 0 1M"),
        );
        let words = ["--object", object, "-c", &write, "-c", &read, &disk];
        let said = place.must(program, &words);
        assert!(
            said.contains("read 1048576/1048576 bytes"),
            "{program}: {said}"
        );
    }
    // With the monitors and the ways named, and with a keyring.
    let port = ceph.monitor_port;
    let named = format!(
        r#"{with_key},"server":[{{"host":"127.0.0.1","port":"{port}"}}],"auth-client-required":["cephx"]"#
    );
    let keyring = place.name("vm.keyring");
    fs::write(&keyring, format!("[client.vm]\nkey = {key}\n")).expect("a file");
    let read = ["-r", "-c", "read -P 2 0 1M"];
    for words in [
        vec!["--object", object, &node(&bare, "disk", &named)],
        vec![
            "-f",
            "raw",
            &format!("rbd:rbd/disk:id=vm:conf={bare}:keyring={keyring}"),
        ],
        vec!["-f", "raw", &ceph.name("disk")],
    ] {
        let said = place.must("our qemu-io", &[&read[..], &words].concat());
        assert!(
            said.contains("read 1048576/1048576 bytes"),
            "{words:?}: {said}"
        );
        assert!(!said.contains("failed"), "{words:?}: {said}");
    }
    who_has_no_good_key_is_told(&place, &ceph, &bare);
}

fn who_has_no_good_key_is_told(place: &Place, ceph: &Ceph, bare: &str) {
    // A key of somebody else's.
    let other = ceph.add_user("other", "profile rbd pool=other");
    place.write("wrong", &other);
    place.write("nonsense", "no key");
    let keys =
        "(is it the key of this user? see the options 'user' and 'key-secret', and the keyring)";
    let nowhere = "see the options 'key-secret' and 'conf'";
    let with = |user: &str| {
        node(
            bare,
            "disk",
            &format!(r#","user":"{user}","key-secret":"key""#),
        )
    };
    for (file, image, message) in [
        ("wrong", with("vm"), keys),
        ("key", with("nobody"), keys),
        // A key that is none.
        ("nonsense,format=raw", with("vm"), "error connecting"),
        // Nobody has said one.
        ("key", node(bare, "disk", ""), nowhere),
        // A good one, of somebody who has no business in this pool.
        (
            "wrong",
            with("other"),
            "error reading header from disk: Operation not permitted",
        ),
    ] {
        let object = match file.contains(',') {
            true => format!("secret,id=key,file={file}"),
            false => format!("secret,id=key,file={file},format=base64"),
        };
        let said = place.run("our qemu-img", &["info", "--object", &object, &image]);
        assert_eq!(said.code, Some(1), "{file}: {image}");
        assert!(said.err.contains(message), "{file}: {image}: {}", said.err);
        let key = place.text("key");
        assert!(
            !said.err.contains(&key) && !said.err.contains(&other),
            "{}",
            said.err
        );
    }
}

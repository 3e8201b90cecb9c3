//! `vellum seal` and `vellum verify` as people use them: exit codes, what is printed, signatures
//! that `minisign` checks, manifests, and copies of images that were tampered with.

use serde_json::Value;
use vellum_testing::Folder;

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

/// A folder with the image `a` of 64 MiB, which has data at 1 MiB.
fn folder() -> Folder {
    let folder = Folder::new(VELLUM);
    folder.must("vellum", "create -q -f qcow2 a 64M");
    folder.io("a", &["write -P 5 1M 5M"]);
    folder
}

/// Changes a byte of the data of guest offset 1 MiB and a bit.
fn tamper(folder: &Folder, name: &str) {
    let map = format!("map -U --output=json {name}");
    let map = folder.run("vellum", &map).expect(0).json();
    let extents = map.as_array().expect("extents");
    let data = extents.iter().find(|extent| extent["start"] == 1 << 20);
    let offset = data.expect("it is mapped")["offset"].as_u64();
    folder.damage(name, offset.expect("an offset") + 5000, b"x");
}

#[test]
fn changes_are_named_and_nothing_reads_them() {
    let folder = folder();
    folder.must("vellum", "seal a");
    assert!(
        folder
            .must("vellum", "verify a")
            .starts_with("Everything is as it was sealed.\n")
    );
    tamper(&folder, "a");
    let out = folder.run("vellum", "verify a").expect(2).out;
    let first = out.lines().next().unwrap_or_default();
    assert_eq!(
        first,
        "0x000000101000-0x000000102000  content     the content differs"
    );
    let found = folder
        .run("vellum", "verify --output=json a")
        .expect(2)
        .json();
    assert_eq!(found["verified"], Value::Bool(false));
    assert_eq!(found["differences"][0]["start"], 0x101000);
    assert_eq!(found["differences"][0]["length"], 4096);
    // Whatever reads all of it stops there.
    folder.img("create -q -f qcow2 -b a -F qcow2 top");
    folder.img("create -q -f qcow2 -b top -F qcow2 above");
    for line in [
        "convert -O raw a out",
        "convert -W -m 8 -O qcow2 a out",
        "convert -c -O qcow2 a out",
        "convert -C -O raw a out",
        "convert -O raw top out",
        "convert -O raw above out",
        "compare a a",
        "dd if=a of=out bs=1M",
    ] {
        let said = folder.run("vellum", line);
        assert_ne!(said.code, Some(0), "{line}: {said:?}");
        let _ = std::fs::remove_file(folder.path("out"));
    }
    // What does not read the place, or is told not to look.
    folder.must("vellum", "io -r -c 'read -P 5 2M 4M' a");
    folder.must(
        "vellum",
        "convert --image-opts -O raw driver=qcow2,verify=off,file.filename=a out",
    );
}

#[test]
fn a_sealed_image_is_refused_to_writers() {
    let folder = folder();
    folder.must("vellum", "seal -q a");
    for line in [
        "resize a 128M",
        "snapshot -c one a",
        "amend -o lazy_refcounts=on a",
        "rebase -u -b b -F raw a",
        "bitmap --add a b",
        "seal a",
        "check -r all a",
    ] {
        let err = folder.run("vellum", line).expect(1).err;
        assert!(
            err.contains("is sealed") && err.contains("--unseal"),
            "{line}: {err}"
        );
    }
    assert!(folder.img("check a").starts_with("No errors"));
    assert_eq!(
        folder.must("vellum", "seal --unseal a"),
        "The image is not sealed any more.\n"
    );
    assert_eq!(
        folder.must("vellum", "seal --unseal a"),
        "The image was not sealed.\n"
    );
    let err = folder.run("vellum", "verify a").expect(1).err;
    assert!(err.contains("no seal"), "{err}");
    folder.must("vellum", "resize a 128M");
    folder.must("vellum", "seal a");
    let opened = "driver=qcow2,unseal=on,file.filename=a";
    folder.must("vellum", &format!("snapshot --image-opts -c one {opened}"));
    folder.refused("vellum", "verify a");
}

#[test]
fn minisign_checks_what_is_signed() {
    let folder = folder();
    folder.must("minisign", "-G -W -p public -s secret");
    folder.must("vellum", "seal --key secret a");
    folder.must(
        "vellum",
        "verify --public-key public --statement statement a",
    );
    let checked = folder.must("minisign", "-Vm statement -p public");
    assert!(checked.contains("file:a"));
    folder.must("minisign", "-G -W -p public2 -s secret2");
    let out = folder
        .run("vellum", "verify --public-key public2 a")
        .expect(2)
        .out;
    assert!(out.contains("Signature: bad."), "{out}");
    // Sealed anew by somebody who has no key.
    folder.must("vellum", "seal --unseal a");
    folder.must("vellum", "seal a");
    let out = folder
        .run("vellum", "verify --public-key public a")
        .expect(2)
        .out;
    assert!(out.contains("Signature: none"), "{out}");
    folder.refused("vellum", "verify --public-key a a");
}

#[test]
fn info_and_audit_tell_of_the_seal() {
    let folder = folder();
    let before = folder
        .run("vellum", "info --output=json a")
        .expect(0)
        .json();
    assert_eq!(before["format-specific"]["data"].get("seal"), None);
    let sealed = folder.must("vellum", "seal a");
    let root = sealed
        .trim()
        .strip_prefix("Content: ")
        .expect("a hash")
        .to_owned();
    let info = folder
        .run("vellum", "info --output=json a")
        .expect(0)
        .json();
    assert_eq!(
        info["format-specific"]["data"]["seal"]["content"],
        root.as_str()
    );
    assert!(
        folder
            .must("vellum", "info a")
            .contains(&format!("content: {root}"))
    );
    let audit = folder
        .run("vellum", "audit --output=json a")
        .expect(0)
        .json();
    assert_eq!(audit["qcow2"]["seal-content"], root.as_str());
    assert_eq!(audit["findings"][0]["code"], "seal");
}

#[test]
fn a_manifest_is_the_same_for_every_format() {
    let folder = folder();
    folder.must("vellum", "seal --manifest first a");
    folder.must("vellum", "convert -O raw a raw");
    folder.must("vellum", "convert -c -O qcow2 a packed");
    folder.must("vellum", "create -q -f qcow2 -b a -F qcow2 top");
    for line in ["-f raw raw", "packed", "top", "a"] {
        folder.must("vellum", &format!("verify --manifest first {line}"));
    }
    folder.must("vellum", "seal --manifest second -f raw raw");
    assert!(folder.read("first") == folder.read("second"));
    let err = folder.refused("vellum", "seal --manifest second a");
    assert!(err.contains("there already"), "{err}");
    folder.io("-f raw raw", &["write -P 6 40M 4k"]);
    let out = folder
        .run("vellum", "verify --manifest first -f raw raw")
        .expect(2)
        .out;
    assert!(
        out.starts_with("0x000002800000-0x000002801000  content "),
        "{out}"
    );
    let err = folder.refused("vellum", "verify --manifest raw a");
    assert!(err.contains("no manifest"), "{err}");
    folder.damage("first", 4096 + 70, b"x");
    let out = folder
        .run("vellum", "verify --manifest first a")
        .expect(2)
        .out;
    assert!(out.contains("  seal "), "{out}");
}

#[test]
fn qemus_name_has_no_such_commands() {
    let folder = folder();
    for name in ["seal", "verify"] {
        let text = folder.run("our qemu-img", &[name, "a"]).err;
        assert!(
            text.contains(&format!("Command not found: {name}")),
            "{text}"
        );
    }
}

//! `vellum scrub` and checksums as people use them: exit codes, what is printed, other programs.

use std::fs;
use std::os::unix::fs::FileExt;

use serde_json::Value;
use vellum_testing::Folder;

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

const KEEP: &str = "--image-opts driver=qcow2,file.filename=a,checksums=on";

/// A folder with the image `a` over the image `base`, with checksums, and data of `base` at 64 KiB.
fn folder() -> Folder {
    let folder = Folder::new(VELLUM);
    folder.must("vellum", "create -q -f qcow2 base 8M");
    folder.io("base", &["write -P 5 0 1M"]);
    folder.must("vellum", "create -q -f qcow2 -b base -F qcow2 a");
    folder.io("a", &["write -P 6 64k 512"]);
    folder.must("vellum", &format!("scrub -q {KEEP}"));
    folder
}

/// Changes a byte of the cluster that holds guest offset 64 KiB.
fn damage(folder: &Folder, inside: u64) {
    let map = folder.run("vellum", "map --output=json a").expect(0).json();
    let extents = map.as_array().expect("extents");
    let data = extents.iter().find(|extent| extent["start"] == 64 << 10);
    let offset = data.expect("it is mapped")["offset"].as_u64();
    let at = offset.expect("a place") + inside;
    let options = &mut fs::OpenOptions::new();
    let file = options.write(true).open(folder.path("a"));
    let file = file.expect("the image");
    let before = file.metadata().expect("metadata").modified();
    file.write_all_at(b"X", at).expect("it is written");
    // A disk does not tell.
    let told = file.set_modified(before.expect("a time"));
    told.expect("the time is set");
}

#[test]
fn a_scrub_names_what_has_changed_and_repairs_it() {
    let folder = folder();
    assert!(
        folder
            .must("vellum", "scrub a")
            .ends_with("Nothing has changed on disk.\n")
    );
    damage(&folder, 8192);
    damage(&folder, 100);
    let text = folder.run("vellum", "scrub --read-only a").expect(2).all();
    assert!(
        text.contains("disk 0x000000010000-0x000000011000\n"),
        "{text}"
    );
    assert!(
        text.contains("8 KiB have changed on disk, 8 KiB of them"),
        "{text}"
    );
    let text = folder
        .run("vellum", "convert -f qcow2 -O raw a out")
        .expect(1)
        .all();
    // QEMU's words, and where the damage is.
    let expected = "error while reading at byte 65536: Input/output error";
    assert!(text.contains(expected), "{text}");
    let more = "warning: 'a': checksum mismatch in the 4096 bytes at offset ";
    assert!(
        text.contains(more) && text.contains("vellum scrub"),
        "{text}"
    );
    let read = folder.run("vellum", "io -r -c 'read 64k 512' a");
    assert_eq!(read.out, "read failed: Input/output error\n");
    assert!(read.err.contains(more), "{read:?}");
    let report = folder
        .run("vellum", "scrub --repair --output=json a")
        .expect(2)
        .json();
    assert_eq!(report["damaged-bytes"], 8192);
    assert_eq!(report["left-bytes"], 4096);
    assert_eq!(report["damaged"][0]["repaired"], false);
    assert_eq!(report["damaged"][1]["guest"]["start"], (64 << 10) + 8192);
    // The guest writes all of the block that nobody else has.
    folder.must("vellum", "io -c 'write -P 6 64k 4k' a");
    assert!(
        folder
            .must("vellum", "scrub a")
            .ends_with("Nothing has changed on disk.\n")
    );
    folder.img("check -q a");
}

#[test]
fn other_programs_drop_the_checksums() {
    let folder = folder();
    let info = folder
        .run("vellum", "info --output=json a")
        .expect(0)
        .json();
    assert_eq!(info["format-specific"]["data"]["checksums"], "a.vsums");
    folder.io("a", &["write -P 7 1M 64k"]);
    let text = folder.run("vellum", "scrub a").expect(1).all();
    assert!(text.contains("checksums=on begins to keep some"), "{text}");
    folder.must("vellum", &format!("scrub {KEEP}"));
    let off = "--image-opts driver=qcow2,file.filename=a,checksums=off";
    folder.must("vellum", &format!("io {off} -c flush"));
    folder.refused("vellum", "scrub a");
}

/// QEMU opens a backing file that it commits into for reading first, and does not clear the bit of the checksums when
/// it goes on to write. What it has written is kept.
#[test]
fn what_qemu_has_committed_is_not_overwritten() {
    let folder = folder();
    folder.io("a", &["write -P 5 0 1M"]);
    folder.must("vellum", &format!("scrub -q {KEEP}"));
    folder.img("create -q -f qcow2 -b a -F qcow2 top");
    folder.io("top", &["write -P 9 0 64k"]);
    folder.img("commit -q top");
    for io in ["io -r", "io"] {
        let read = folder.run("vellum", &format!("{io} -c 'read 0 64k' a"));
        assert_eq!(read.out, "read failed: Input/output error\n", "{io}");
        let told = read.err;
        assert!(told.contains("or another program has"), "{told}");
    }
    let text = folder.run("vellum", "scrub --repair a").expect(2).all();
    assert!(
        text.contains("a repair would bring back older ones"),
        "{text}"
    );
    folder.io("-r a", &["read -P 9 0 64k"]);
    let off = "--image-opts driver=qcow2,file.filename=a,checksums=off";
    folder.must("vellum", &format!("io {off} -c flush"));
    folder.img("check -q a");
    folder.must("vellum", &format!("scrub -q {KEEP}"));
    folder.must("vellum", "io -r -c 'read -P 9 0 64k' a");
}

#[test]
fn checksums_that_are_gone_or_of_another_image_are_told_of() {
    let folder = folder();
    let sums = folder.path("a.vsums");
    fs::rename(&sums, folder.path("moved")).expect("it is renamed");
    let text = folder.run("vellum", "scrub a").expect(1).all();
    assert!(text.contains("give them up with checksums=off"), "{text}");
    folder.must("vellum", "info a");
    let moved = "--image-opts driver=qcow2,file.filename=a,checksums=moved";
    assert!(
        folder
            .must("vellum", &format!("scrub {moved}"))
            .ends_with("Nothing has changed on disk.\n")
    );
    fs::write(&sums, vec![1; 8192]).expect("it is written");
    let text = folder.run("vellum", "scrub a").expect(1).all();
    assert!(text.contains("not the checksums of the image"), "{text}");
    folder.refused("vellum", "scrub base");
}

/// What is 300 GiB long and holds next to nothing is scrubbed at once, and in full.
#[test]
fn a_scrub_goes_past_long_holes() {
    let folder = folder();
    let options = &mut fs::OpenOptions::new();
    let file = options.write(true).open(folder.path("a"));
    let file = file.expect("the image");
    file.set_len(300 << 30).expect("it is longer");
    let scrub = |options: &str| -> Value {
        let line = format!("scrub --output=json {options}a");
        folder.run("vellum", &line).json()
    };
    let started = std::time::Instant::now();
    let found = scrub("");
    assert_eq!(found["left-bytes"], 0);
    file.write_all_at(b"far", 200 << 30).expect("it is written");
    assert_eq!(scrub("")["new-bytes"], 1 << 20);
    file.write_all_at(b"X", (200 << 30) + 5000)
        .expect("it is written");
    let found = scrub("--read-only ");
    assert_eq!(found["damaged-bytes"], 4096);
    assert_eq!(found["damaged"][0]["file"]["start"], (200u64 << 30) + 4096);
    // Step by step it took some ten seconds each.
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
}

/// What takes the place of an image may have checksums of its own; those of others stay.
#[test]
fn an_image_that_is_overwritten_takes_its_checksums_along() {
    let folder = folder();
    let sums = folder.path("a.vsums");
    fs::copy(&sums, folder.path("kept")).expect("a copy");
    folder.must("vellum", "create -q -f qcow2 a 8M");
    assert!(!sums.exists());
    assert!(
        folder
            .must("vellum", &format!("scrub {KEEP}"))
            .ends_with("Nothing has changed on disk.\n")
    );
    // Those of another image, which may lie elsewhere by now; this one's get another name.
    let (kept, second) = (folder.path("kept"), folder.path("a.2.vsums"));
    folder.must("vellum", "create -q -f qcow2 a 8M");
    fs::copy(&kept, &sums).expect("a copy");
    for _ in 0..2 {
        folder.must("vellum", &format!("scrub {KEEP}"));
    }
    assert_eq!(fs::read(&sums).ok(), fs::read(&kept).ok());
    assert!(second.exists() && !folder.has("a.3.vsums"));
    folder.must("vellum", "create -q -f qcow2 a 8M");
    assert!(sums.exists() && !second.exists());
    // Under a name that the user gives, nobody else's are overwritten.
    let named = "--image-opts driver=qcow2,file.filename=a,checksums=a.vsums";
    let text = folder
        .run("vellum", &format!("scrub {named}"))
        .expect(1)
        .all();
    assert!(
        text.contains("a.vsums' holds the checksums of another image"),
        "{text}"
    );
    // What is no file.
    fs::remove_file(&sums).expect("it is there");
    folder.must("vellum", &format!("scrub {KEEP}"));
    fs::rename(&sums, folder.path("kept")).expect("it is there");
    std::os::unix::fs::symlink("kept", &sums).expect("a link");
    folder.must("vellum", "convert -f qcow2 -O qcow2 base a");
    assert!(sums.exists(), "a link leads elsewhere");
}

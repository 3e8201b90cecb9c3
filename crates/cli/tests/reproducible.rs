//! Images that are the same byte by byte whenever they are made.

use vellum_testing::{Folder, Said};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");
const MIB: usize = 1 << 20;

fn run(folder: &Folder, date: Option<&str>, words: &[&str]) -> Said {
    let mut command = folder.command("vellum", words);
    match date {
        Some(date) => command.env("SOURCE_DATE_EPOCH", date),
        None => command.env_remove("SOURCE_DATE_EPOCH"),
    };
    Said::of(&mut command)
}

/// Zeroes, repeated bytes and noise in turns.
fn write_source(folder: &Folder) {
    let mut random = fastrand::Rng::with_seed(7);
    let mut source = vec![0; 24 * MIB];
    for part in source.chunks_mut(20 << 10) {
        match random.u8(..3) {
            0 => {}
            1 => part.fill(random.u8(..)),
            _ => random.fill(part),
        }
    }
    folder.write("source", source);
}

#[test]
fn copies_are_the_same_every_time() {
    let folder = Folder::new(VELLUM);
    write_source(&folder);
    for options in [
        &[][..],
        &["-c"],
        &["-c", "-o", "compression_type=zstd,cluster_size=4k"],
        &["-o", "cluster_size=1k"],
        &["-o", "extended_l2=on,cluster_size=128k", "-m", "16"],
    ] {
        let images = ["a", "b", "c"].map(|name| {
            let convert = [
                &["convert", "--reproducible", "-f", "raw", "-O", "qcow2"],
                options,
            ];
            let words = [&convert.concat(), &["source", name][..]].concat();
            folder.must("vellum", &words);
            folder.must(
                "vellum",
                &["compare", "-q", "-f", "raw", "-F", "qcow2", "source", name],
            );
            folder.read(name)
        });
        assert!(
            images[0] == images[1] && images[1] == images[2],
            "{options:?}"
        );
    }
}

#[test]
fn what_depends_on_time_or_chance_is_refused() {
    let folder = Folder::new(VELLUM);
    folder.write("source", [1; 4096]);
    let convert = ["convert", "--reproducible", "-f", "raw", "-O", "qcow2"];
    for (options, message) in [
        (&["-W"][..], "--reproducible excludes -W, -C and -n"),
        (&["-C"], "--reproducible excludes -W, -C and -n"),
        (
            &[
                "--object",
                "secret,id=s,data=x",
                "-o",
                "encrypt.format=luks,encrypt.key-secret=s",
            ],
            "--reproducible excludes encryption",
        ),
    ] {
        let words = [&convert, options, &["source", "target"]].concat();
        let told = run(&folder, None, &words).expect(1).err;
        assert!(told.contains(message), "{told}");
        assert!(!folder.has("target"));
    }
}

#[test]
fn snapshots_have_the_date_that_is_asked_for() {
    let folder = Folder::new(VELLUM);
    let snapshot = ["snapshot", "-c", "s", "image"];
    let images = [0, 1].map(|_| {
        folder.must("vellum", "create -q -f qcow2 image 64M");
        run(&folder, Some("1234567890"), &snapshot).expect(0);
        folder.read("image")
    });
    assert!(images[0] == images[1]);
    let info = run(&folder, None, &["info", "--output=json", "image"]);
    let info = info.json();
    assert_eq!(info["snapshots"][0]["date-sec"], 1_234_567_890);
    let told = run(&folder, Some("yesterday"), &snapshot).expect(1).err;
    assert!(told.contains("SOURCE_DATE_EPOCH"), "{told}");
}

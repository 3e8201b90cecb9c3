//! `vellum compact` as people use it, on images of QEMU's program.

use vellum_testing::Folder;

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");
const MIB: u64 = 1 << 20;

/// The image `d` as arguments of `qemu-io` and others.
fn image(options: &str) -> &'static str {
    if options.contains("encrypt") {
        return "--object secret,id=s,data=secret --image-opts \
                driver=qcow2,encrypt.key-secret=s,file.filename=d";
    }
    "d"
}

/// What is read from `d`: the data at its end, and gaps before.
fn reads() -> Vec<String> {
    let pieces = (0..16).map(|piece| {
        let pattern = if piece < 12 { 0 } else { 7 };
        format!("read -P {pattern} {piece}M 1M")
    });
    pieces.collect()
}

#[test]
fn images_of_every_kind_get_short() {
    for options in [
        "cluster_size=64k",
        "cluster_size=4k,lazy_refcounts=on",
        "extended_l2=on",
        "compat=0.10",
        "refcount_bits=1",
        "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10",
        "encrypt.format=aes,encrypt.key-secret=s",
    ] {
        let folder = Folder::new(VELLUM);
        let create = "create -q -f qcow2 --object secret,id=s,data=secret";
        folder.img(&format!("{create} -o {options} d 16M"));
        let written = ["write -P 3 0 12M", "write -P 7 12M 4M", "discard 0 12M"];
        folder.io(image(options), &written);
        let before = folder.len_bytes("d");
        assert!(before >= 16 * MIB, "{options}: {before}");
        let image = image(options);
        let compact = format!("compact --output=json {image}");
        let report = folder.run("vellum", &compact).expect(0).json();
        assert_eq!(report["old-file-bytes"], before, "{options}");
        let after = folder.len_bytes("d");
        // LUKS has a header of 2 MiB.
        assert!(after < 7 * MIB, "{options}: {after} of {before}");
        folder.img(&format!("check {image}"));
        folder.io(image, &reads());
    }
}

#[test]
fn compressed_images_get_short() {
    for kind in ["zlib", "zstd"] {
        let folder = Folder::new(VELLUM);
        // Bytes that compress a little.
        let mut random = fastrand::Rng::with_seed(1);
        let bytes: Vec<u8> = (0..8 * MIB).map(|_| random.u8(..64)).collect();
        folder.write("raw", &bytes);
        let convert = "convert -c -f raw -O qcow2";
        folder.img(&format!("{convert} -o compression_type={kind} raw d"));
        let before = folder.len_bytes("d");
        folder.io("d", &["discard 0 6M"]);
        let said = folder.run("vellum", "compact d").expect(0).all();
        assert!(said.starts_with("The file had "), "{said}");
        assert!(
            4 * folder.len_bytes("d") < 2 * before,
            "{} of {before}",
            folder.len_bytes("d")
        );
        folder.img("check d");
        folder.io("-f raw raw", &["write -q -z 0 6M"]);
        folder.img("compare raw d");
    }
}

#[test]
fn what_cannot_be_compacted_is_told() {
    let folder = Folder::new(VELLUM);
    folder.img("create -q -f raw raw 1M");
    let said = folder.run("vellum", "compact -f raw raw").expect(1).all();
    assert!(said.contains("not compacted"), "{said}");
    folder.img("create -q -f qcow2 -o data_file=data d 1M");
    let said = folder.run("vellum", "compact d").expect(1).all();
    assert!(said.contains("data file"), "{said}");
    folder.run("vellum", "compact nowhere").expect(1);
}

#[test]
fn what_is_not_counted_is_no_gap() {
    // The entry of the refcount table, and the count of a data cluster that lies low.
    for (at, zeroes) in [(65536, 8), (131_072 + 2 * 5, 2)] {
        let folder = Folder::new(VELLUM);
        folder.img("create -q -f qcow2 d 1G");
        let commands = [
            "write -P 1 0 64k",
            "write -P 2 64k 32M",
            "write -P 3 40M 8M",
            "discard 64k 32M",
        ];
        folder.io("d", &commands);
        folder.damage("d", at, &vec![0; zeroes]);
        let before = folder.len_bytes("d");
        let said = folder.run("vellum", "compact d").expect(1).all();
        assert!(said.contains("check -r all"), "{said}");
        assert_eq!(folder.len_bytes("d"), before);
        folder.must("vellum", "check -q -r all d");
        folder.must("vellum", "compact d");
        let reads = ["read -P 1 0 64k", "read -P 0 64k 32M", "read -P 3 40M 8M"];
        folder.io("d", &reads);
        assert!(
            folder.len_bytes("d") < 10 * MIB,
            "{}",
            folder.len_bytes("d")
        );
    }
}

#[test]
fn holes_stay_holes() {
    use std::os::unix::fs::MetadataExt;
    let folder = Folder::new(VELLUM);
    folder.img("create -q -f qcow2 -o preallocation=metadata d 256M");
    let commands = ["discard 0 128M", "write -P 7 255M 64k"];
    folder.io("d", &commands);
    folder.must("vellum", "compact d");
    let taken = 512 * folder.path("d").metadata().expect("the image").blocks();
    assert!(taken < 4 * MIB, "{taken}");
    assert!(
        folder.len_bytes("d") < 140 * MIB,
        "{}",
        folder.len_bytes("d")
    );
    folder.img("check d");
    let reads = ["read -P 0 0 255M", "read -P 7 255M 64k"];
    folder.io("d", &reads);
}

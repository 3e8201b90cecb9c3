//! Images of other programs beside the real `qemu-img`: made, converted, described and checked alike, and
//! each tool reads what the other one writes.

use crate::twins::Twins;

/// Each format that is written, with options that change how.
const TARGETS: &[(&str, &str)] = &[
    (
        "vmdk",
        "subformat=monolithicSparse,adapter_type=lsilogic,hwversion=10",
    ),
    ("vmdk", "subformat=monolithicFlat"),
    ("vmdk", "subformat=twoGbMaxExtentSparse,zeroed_grain=on"),
    ("vmdk", "subformat=twoGbMaxExtentFlat"),
    ("vmdk", "subformat=streamOptimized"),
    ("vhdx", "block_size=1M,log_size=2M"),
    ("vpc", "force_size=on"),
    ("vpc", "subformat=fixed"),
    ("vdi", "static=off"),
    ("vdi", "static=on"),
    ("parallels", "cluster_size=64k"),
    ("qed", "cluster_size=4096,table_size=2"),
    ("qcow", ""),
];

const SOURCE: &[&str] = &[
    "qemu-img create -q -f raw r 5M",
    "qemu-io -f raw r: write -P 6 1000 300k; write -P 7 3M 70000; write -P 8 5242368 512",
];

#[test]
fn converted_images_are_read_by_both() {
    let twins = Twins::new(SOURCE);
    for (format, options) in TARGETS {
        let image = format!("i.{format}");
        let mut convert = vec!["convert", "-f", "raw", "-O", format, "r", &image];
        if !options.is_empty() {
            convert.extend(["-o", options]);
        }
        let [ours, theirs] = twins.both(&convert);
        assert_eq!(ours, theirs, "{convert:?}");
        let compare = ["compare", "-f", "raw", "-F", format, "r", &image];
        for answer in [twins.run_ours(&compare), twins.run_theirs_on_ours(&compare)] {
            // A disk of whole cylinders is longer.
            assert_eq!(answer.code, Some(0), "{format} {options}: {answer:?}");
        }
        let check = ["check", "-f", format, &image];
        let checked = twins.run_theirs_on_ours(&check);
        assert_eq!(twins.run_ours(&check), checked, "{format} {options}");
        // And back.
        let back = ["convert", "-f", format, "-O", "raw", &image, "back"];
        assert_eq!(twins.run_ours(&back).code, Some(0));
        let same = ["compare", "-f", "raw", "-F", "raw", "r", "back"];
        assert_eq!(twins.run_ours(&same).code, Some(0), "{format} {options}");
    }
}

const IMAGES: &[&str] = &[
    "qemu-img create -q -f vmdk base.vmdk 3M",
    "qemu-img create -q -f vmdk -b base.vmdk -F vmdk over.vmdk",
    "qemu-io -f vmdk over.vmdk: write -P 1 64k 64k",
    "qemu-img create -q -f vmdk -o subformat=monolithicFlat flat.vmdk 1M",
    "qemu-img create -q -f vmdk -o subformat=twoGbMaxExtentSparse many.vmdk 5G",
    "qemu-img create -q -f vhdx a.vhdx 20M",
    "qemu-img create -q -f vpc a.vpc 20M",
    "qemu-img create -q -f vdi a.vdi 20M",
    "qemu-io -f vdi a.vdi: write -P 1 3M 1k",
    "qemu-img create -q -f parallels a.parallels 20M",
    "qemu-img create -q -f raw base 2M",
    "qemu-img create -q -f raw other 1M",
    "qemu-io -f raw other: write -P 9 10k 70k",
    "qemu-img create -q -f qed -b base -F raw a.qed",
    "qemu-io -f qed a.qed: write -P 1 100k 1k",
    "qemu-img create -q -f qcow -b base -F raw a.qcow",
    "qemu-io -f qcow a.qcow: write -P 1 100k 1k",
];

#[test]
fn images_are_described_alike() {
    let twins = Twins::copied(IMAGES);
    for image in [
        "over.vmdk",
        "flat.vmdk",
        "many.vmdk",
        "a.vhdx",
        "a.vpc",
        "a.vdi",
        "a.parallels",
        "a.qed",
        "a.qcow",
    ] {
        for command in ["info", "info --output=json", "check", "check --output=json"] {
            twins.same(&format!("{command} {image}"));
        }
    }
    twins.same("info --backing-chain over.vmdk");
    twins.same("map --output=json over.vmdk");
    twins.same("map --output=json a.vdi");
    twins.same("commit a.qed");
    twins.same("compare base a.qed");
    twins.same("rebase -b other -F raw a.qed");
    twins.same("info a.qed");
    twins.same("map --output=json a.qed");
    twins.same_words(&["rebase", "-b", "", "a.qed"]);
    twins.same("info a.qed");
    twins.same("compare -f qed a.qed base");
    twins.same("rebase -u -b base -F raw a.qed");
    twins.same("check a.qed");
    twins.same("rebase -b base -F raw a.qcow");
}

#[test]
fn what_cannot_be_is_refused_alike() {
    let twins = Twins::copied(IMAGES);
    for line in [
        "create -f vdi x 600T",
        "create -f vdi -b base -F raw x 1M",
        "create -f vhdx -o subformat=strange x 1M",
        "create -f vhdx -o block_size=3M x 1M",
        "create -f vhdx x 65T",
        "create -f vpc x 3T",
        "create -f qed -o cluster_size=12345 x 1M",
        "create -f qcow x 0",
        "create -f vmdk -o subformat=monolithicFlat -b base.vmdk -F vmdk x 1M",
        "create -f vmdk -b base -F raw x 1M",
        "create -f bochs x 1M",
        "create -f dmg x 1M",
        "create -f vdi -o help",
        "create -f vmdk -o help",
        "create -f vpc -o help",
        "create -f parallels -o help",
        "convert -c -f raw -O vdi base x",
        "resize a.vdi 40M",
        "resize a.qed 40M",
        "snapshot -l a.vdi",
        "snapshot -c s a.vdi",
        "amend -o size=1M a.vdi",
        "check -r all a.vdi",
        "info -f vdi a.vpc",
        "info -f vmdk a.vdi",
        "info -f qed a.vdi",
        "info -f qcow a.vdi",
        "info -f parallels a.vdi",
        "info -f bochs a.vdi",
        "info -f cloop a.vdi",
        "info -f dmg a.vdi",
    ] {
        twins.same(line);
    }
}

/// A commit into a full file leaves the image on top as it was, and the next try ends it.
#[test]
fn a_failed_commit_leaves_the_image_readable() {
    let twins = Twins::new(&[
        "qemu-img create -q -f vmdk base.vmdk 8M",
        "qemu-io base.vmdk: write -P 1 0 1M",
        "qemu-img create -q -f vmdk -b base.vmdk -F vmdk over.vmdk",
        "qemu-io over.vmdk: write -P 2 2M 4M",
    ]);
    let over = twins.ours("over.vmdk");
    let folder = over.parent().unwrap();
    let vellum = env!("CARGO_BIN_EXE_vellum");
    let line = format!("trap '' XFSZ; ulimit -f 4096; {vellum} commit over.vmdk");
    let failed = std::process::Command::new("bash")
        .args(["-c", &line])
        .current_dir(folder)
        .output()
        .expect("bash");
    assert_eq!(failed.status.code(), Some(1), "{failed:?}");
    let reads = [
        "-r",
        "-f",
        "vmdk",
        "-c",
        "read -P 1 0 1M",
        "-c",
        "read -P 2 2M 4M",
    ];
    let read = |image: &str| {
        let output = std::process::Command::new(vellum)
            .arg("io")
            .args(reads)
            .arg(image)
            .current_dir(folder)
            .output()
            .expect("vellum");
        assert!(output.status.success(), "{output:?}");
    };
    read("over.vmdk");
    assert_eq!(twins.run_ours(&["commit", "over.vmdk"]).code, Some(0));
    read("base.vmdk");
}

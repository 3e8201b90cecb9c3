//! `commit` beside the real one.

use crate::twins::Twins;

const CHAIN: &[&str] = &[
    "qemu-img create -q -f qcow2 base 1M",
    "qemu-io base: write -P 1 0 1M",
    "qemu-img create -q -f qcow2 -b base -F qcow2 mid",
    "qemu-io mid: write -P 2 128k 128k; write -z 256k 64k",
    "qemu-img create -q -f qcow2 -b mid -F qcow2 top",
    "qemu-io top: write -P 3 64k 128k; write -z 512k 64k; write -P 4 1000k 1k",
];

/// What `lines` leave is the same, and sound.
#[track_caller]
fn same_result(twins: &Twins, lines: &[&str], images: &[&str]) {
    for line in lines {
        twins.same_but_places(line);
    }
    for image in images {
        twins.same_but_places(&format!("map --output=json -U {image}"));
        same_content(twins, image);
    }
}

#[track_caller]
fn same_content(twins: &Twins, image: &str) {
    let ours = twins.run_theirs_on_ours(&["check", image]);
    assert_eq!(ours.code, Some(0), "{image}: {ours:?}");
    let copies = [twins.ours("copy"), twins.theirs("copy")];
    twins.same(&format!("convert -O raw {image} copy"));
    let [ours, theirs] = copies.map(|path| std::fs::read(path).expect("a copy"));
    assert!(ours == theirs, "{image} holds something else");
}

#[test]
fn an_overlay_goes_into_its_backing_file() {
    for options in [
        "",
        "-d ",
        "-t none ",
        "-q ",
        "-f qcow2 ",
        "-r 1G ",
        "-t directsync -d ",
    ] {
        let twins = Twins::new(CHAIN);
        let line = format!("commit {options}top");
        same_result(&twins, &[&line, "info mid"], &["top", "mid", "base"]);
    }
}

#[test]
fn an_overlay_that_looks_for_zeroes_is_emptied_too() {
    let twins = Twins::new(CHAIN);
    let line =
        "commit --image-opts driver=qcow2,file.filename=top,detect-zeroes=unmap,discard=unmap";
    same_result(&twins, &[line], &["top", "mid", "base"]);
}

#[test]
fn layers_between_go_along() {
    for options in ["-b base", "-d -b base", "-b ./base", "-b mid"] {
        let twins = Twins::new(CHAIN);
        let line = format!("commit {options} top");
        same_result(&twins, &[&line], &["base", "mid"]);
        twins.same("info top");
    }
}

#[test]
fn other_sizes_and_formats() {
    let twins = Twins::new(&[
        "qemu-img create -q -f raw base 300k",
        "qemu-io -f raw base: write -P 1 0 300k",
        "qemu-img create -q -f qcow2 -o cluster_size=4k -b base -F raw top 1M",
        "qemu-io top: write -P 3 64k 8k; write -P 4 900k 8k; write -z 100k 100k",
        "qemu-img create -q -f qcow2 -o extended_l2=on -b base -F raw large 2M",
        "qemu-img create -q -f qcow2 -o compat=0.10 -b large -F qcow2 small 500k",
        "qemu-io small: write -P 5 1k 3k",
    ]);
    // A raw file gets exactly what the image holds; QEMU copies in larger pieces, and so
    // writes zeroes too.
    same_result(&twins, &["commit top", "info base"], &[]);
    same_content(&twins, "top");
    same_content(&twins, "small");
    same_result(&twins, &["commit small"], &[]);
    same_content(&twins, "small");
    same_content(&twins, "large");
    // A layer between that is shorter hides what lies beyond its end.
    let twins = Twins::new(&[
        "qemu-img create -q -f qcow2 base 1M",
        "qemu-io base: write -P 1 0 1M",
        "qemu-img create -q -f qcow2 -b base -F qcow2 mid 512k",
        "qemu-img create -q -f qcow2 -b mid -F qcow2 top 1M",
        "qemu-io top: write -P 3 64k 8k",
    ]);
    same_result(&twins, &["commit -b base top"], &["base"]);
}

#[test]
fn what_cannot_be_is_refused_in_the_same_words() {
    let twins = Twins::new(CHAIN);
    twins.all_same(&[
        "commit",
        "commit top mid",
        "commit -t bad top",
        "commit -r x top",
        "commit none",
        "commit base",
        "commit -b none top",
        "commit -b top top",
        "commit -f raw top",
        "commit -f bad top",
        "commit --foo",
        "commit -q -d base",
    ]);
}

#[test]
fn the_base_is_the_one_that_the_chain_shows() {
    let prepare = [
        "qemu-img create -q -f raw base 2M",
        "qemu-io -f raw base: write -P 1 0 2M",
        "qemu-img create -q -f qcow2 -u -b base -F raw top 1M",
        "qemu-img create -q -f qcow2 other 1M",
    ];
    let in_window =
        r#"{"driver":"raw","offset":1048576,"file":{"driver":"file","filename":"base"}}"#;
    let written = |twins: &Twins| {
        for folder in [twins.ours(""), twins.theirs("")] {
            let words = ["-c", "write -P 3 64k 64k", "top"];
            let written = std::process::Command::new("qemu-io")
                .args(words)
                .current_dir(folder)
                .output();
            assert!(written.expect("qemu-io").status.success());
        }
    };
    let same_base = |twins: &Twins| {
        let bytes = [twins.ours("base"), twins.theirs("base")].map(std::fs::read);
        let [ours, theirs] = bytes.map(|bytes| bytes.expect("a file"));
        assert!(ours == theirs);
        assert_eq!(ours[(1 << 20) + (64 << 10)], 3);
    };
    // A window of a file, as the image says.
    let twins = Twins::new(&prepare);
    let name = format!("json:{in_window}");
    twins.same_words(&["rebase", "-u", "-b", &name, "-F", "raw", "top"]);
    written(&twins);
    twins.same("commit top");
    same_base(&twins);
    // As the user says, whatever the image names.
    let twins = Twins::new(&prepare);
    twins.same("rebase -u -b other -F qcow2 top");
    written(&twins);
    let name = format!(r#"json:{{"driver":"qcow2","file.filename":"top","backing":{in_window}}}"#);
    twins.same_words(&["commit", &name]);
    same_base(&twins);
}

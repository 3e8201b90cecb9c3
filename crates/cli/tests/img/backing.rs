//! How overlays name what they stand on, beside the real tool.

use crate::twins::Twins;

/// A folder in both places, which no image tool makes.
fn with_folder(prepare: &[&str]) -> Twins {
    let twins = Twins::new(prepare);
    for folder in [twins.ours("sub"), twins.theirs("sub")] {
        std::fs::create_dir(folder).expect("a folder");
    }
    twins
}

const BASE: &[&str] = &[
    "qemu-img create -q -f qcow2 base 1M",
    "qemu-io base: write -P 1 0 300k",
    "qemu-img create -q -f raw plain 300k",
    "qemu-io -f raw plain: write -P 2 0 300k",
];

#[test]
fn names_are_resolved_from_the_image_that_holds_them() {
    let twins = with_folder(BASE);
    for folder in [twins.ours(""), twins.theirs("")] {
        std::fs::copy(folder.join("base"), folder.join("a:b")).expect("a copy");
    }
    twins.all_same(&[
        "create -f qcow2 -b ../base -F qcow2 sub/x",
        "info --backing-chain sub/x",
        "map --output=json sub/x",
        "create -f qcow2 -b base -F qcow2 sub/y",
        "create -f qcow2 -b x -F qcow2 sub/y",
        "info --backing-chain --output=json sub/y",
        "compare sub/y base",
        "create -f qcow2 -b file:base -F qcow2 z",
        "info --backing-chain z",
        "create -f qcow2 -b a:b -F qcow2 c",
        "create -f qcow2 -b ./a:b -F qcow2 c",
        "info --backing-chain c",
        "create -f qcow2 -b file:a:b -F qcow2 d",
        "info --backing-chain d",
        "create -f qcow2 -b none/../base -F qcow2 e",
    ]);
}

#[test]
fn descriptions_and_protocols_are_names_too() {
    let twins = with_folder(BASE);
    let described = r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"base"}}"#;
    twins.same_words(&["create", "-f", "qcow2", "-b", described, "-F", "qcow2", "x"]);
    twins.all_same(&["info x", "map --output=json x", "compare x base"]);
    let options = format!(
        "backing_file={},backing_fmt=qcow2",
        described.replace(',', ",,")
    );
    twins.same_words(&["create", "-f", "qcow2", "-o", &options, "sub/x"]);
    twins.all_same(&["info sub/x", "map sub/x"]);
    // A flat one, and one that is wrong.
    let flat = r#"json:{"driver":"raw","file.filename":"plain"}"#;
    twins.same_words(&["create", "-f", "qcow2", "-b", flat, "-F", "raw", "y"]);
    twins.all_same(&[
        "info --backing-chain y",
        "map y",
        "create -f qcow2 -b json:{} -F qcow2 z",
        "create -f qcow2 -u -b foo:bar -F raw p 1M",
        "info p",
        "map p",
        "create -f qcow2 -b foo:bar -F raw q 1M",
        "create -q -f qcow2 -u -b nbd://localhost:1/x -F raw n 1M",
        "info n",
    ]);
}

/// Makes the backing format's extension one that nobody knows.
fn forget_format(twins: &Twins, image: &str) {
    for path in [twins.ours(image), twins.theirs(image)] {
        let mut bytes = std::fs::read(&path).expect("an image");
        let kind = 0xe279_2acau32.to_be_bytes();
        let at = bytes.windows(4).position(|word| word == kind);
        let at = at.expect("an extension");
        bytes[at..at + 4].copy_from_slice(&0x1234_5678u32.to_be_bytes());
        std::fs::write(&path, bytes).expect("a write");
    }
}

#[test]
fn a_missing_format_is_probed_and_a_wrong_one_is_believed() {
    let twins = Twins::new(&[
        "qemu-img create -q -f qcow2 base 1M",
        "qemu-io base: write -P 1 0 300k",
        "qemu-img create -q -f raw plain 300k",
        "qemu-io -f raw plain: write -P 2 0 300k",
        "qemu-img create -q -f qcow2 -b base -F qcow2 x",
        "qemu-img create -q -f qcow2 -b plain -F raw y",
        "qemu-img create -q -f qcow2 -b base -F qcow2 wrong",
        "qemu-img rebase -u -b base -F raw wrong",
        "qemu-img create -q -f qcow2 -b plain -F raw bad",
        "qemu-img rebase -u -b plain -F qcow2 bad",
        "qemu-img create -q -f qcow2 -u -b gone -F qcow2 alone 1M",
    ]);
    forget_format(&twins, "x");
    forget_format(&twins, "y");
    twins.all_same(&[
        "create -f qcow2 -b base z",
        "create -f qcow2 -b plain z",
        "create -f qcow2 -u -b base z 1M",
        "info x",
        "info --backing-chain x",
        "map --output=json x",
        "info --backing-chain y",
        "map --output=json y",
        "compare x base",
        "commit x",
        "info wrong",
        "map --output=json wrong",
        "info bad",
        "map bad",
        "info --backing-chain bad",
        "info alone",
        "map alone",
        "info --backing-chain alone",
        "check alone",
        "compare alone base",
        "commit alone",
        "rebase -b  alone",
    ]);
}

#[test]
fn a_long_chain_is_opened_and_read() {
    let mut lines = vec![
        "qemu-img create -q -f qcow2 c0 4M".to_owned(),
        "qemu-io c0: write -P 1 0 4M".to_owned(),
    ];
    for number in 1..12 {
        let below = number - 1;
        let at = number * 192;
        lines.push(format!(
            "qemu-img create -q -f qcow2 -b c{below} -F qcow2 c{number}"
        ));
        lines.push(format!("qemu-io c{number}: write -P {number} {at}k 4k"));
    }
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let twins = Twins::new(&lines);
    twins.all_same(&["info --backing-chain c11", "map --output=json c11"]);
    twins.same("convert -O raw c11 flat");
    let [ours, theirs] = [twins.ours("flat"), twins.theirs("flat")];
    assert!(std::fs::read(ours).unwrap() == std::fs::read(theirs).unwrap());
    twins.same("commit -b c3 c11");
    twins.same_but_places("map --output=json c3");
}

#[test]
fn options_change_how_the_named_backing_file_is_opened() {
    let twins = Twins::new(&[
        "qemu-img create -q -f qcow2 base 1M",
        "qemu-io base: write -P 1 0 300k",
        "qemu-img create -q -f qcow2 -b base -F qcow2 wrong 1M",
        "qemu-img rebase -u -b base -F vmdk wrong",
        "qemu-img create -q -f qcow2 alone 1M",
    ]);
    for (image, options) in [
        ("wrong", r#""backing.driver":"qcow2""#),
        ("wrong", r#""backing.driver":"raw""#),
        ("wrong", r#""backing.driver":"raw","backing.size":65536"#),
        ("wrong", r#""backing":{"driver":"foo"}"#),
        ("wrong", r#""backing.driver":"qcow2","backing.foo":1"#),
        ("alone", r#""backing.driver":"qcow2""#),
    ] {
        let name = format!(r#"json:{{"driver":"qcow2","file.filename":"{image}",{options}}}"#);
        twins.same_words(&["map", "--output=json", &name]);
    }
}

/// Some writers leave the extension there and its name empty, of length zero or all NULs. It says nothing then.
#[test]
fn an_empty_name_of_a_format_is_none() {
    let twins = Twins::new(BASE);
    twins.all_same(&[
        "create -f qcow2 -b base -F qcow2 none",
        "create -f qcow2 -b base -F qcow2 nuls",
        "create -f qcow2 -b plain -F raw raw",
    ]);
    for (name, is_short) in [("none", true), ("nuls", false), ("raw", true)] {
        for path in [twins.ours(name), twins.theirs(name)] {
            let mut bytes = std::fs::read(&path).expect("the image");
            let kind = 0xe279_2acau32.to_be_bytes();
            let found = bytes.windows(4).position(|found| found == kind);
            let at = found.expect("a format") + 4;
            match is_short {
                // What was padding is an extension that nobody knows, of length zero.
                true => bytes[at..at + 12].copy_from_slice(&[0, 0, 0, 0, 9, 9, 9, 9, 0, 0, 0, 0]),
                false => bytes[at + 4..at + 12].fill(0),
            }
            std::fs::write(&path, bytes).expect("written");
        }
        twins.same(&format!("info --backing-chain {name}"));
        twins.same(&format!("info --output=json {name}"));
        twins.same(&format!("map --output=json {name}"));
        twins.same(&format!("check {name}"));
        twins.same(&format!("convert -O raw {name} out"));
        twins.same(&format!("rebase -u -b base -F qcow2 {name}"));
        twins.same(&format!("info {name}"));
    }
}

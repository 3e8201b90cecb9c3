//! What the image tool does on its own account.

use std::process::Command;

use crate::twins::Twins;

#[test]
fn unknown_subcommands_are_refused() {
    Twins::new(&[]).all_same(&["frobnicate", "frobnicate --frobnicate"]);
}

#[test]
fn help_and_version_are_there() {
    let twins = Twins::new(&[]);
    let version = twins.run_ours(&["--version"]);
    assert!(
        version.out.starts_with("qemu-img version 10.0.2 (vellum "),
        "{version:?}"
    );
    for name in [
        "amend", "bench", "bitmap", "check", "commit", "compare", "convert", "create", "dd",
        "info", "map", "measure", "rebase", "resize", "snapshot",
    ] {
        let answer = twins.run_ours(&[name, "--help"]);
        assert_eq!(answer.code, Some(0), "{name}");
        assert!(
            answer.out.contains(&format!("qemu-img {name} ")),
            "{answer:?}"
        );
    }
}

#[test]
fn a_chain_that_bites_its_tail_is_refused() {
    let twins = Twins::new(&[
        "qemu-img create -q -f qcow2 loop 1M",
        "qemu-img rebase -u -b loop -F qcow2 loop",
    ]);
    let answer = twins.run_ours(&["map", "loop"]);
    assert_eq!(answer.code, Some(1));
    assert!(
        answer.err.contains("creates an infinite loop"),
        "{answer:?}"
    );
    twins.same("info --backing-chain loop");
}

/// `-U` takes no locks, which would keep a copy from its own source.
#[test]
fn a_copy_onto_its_own_source_is_refused() {
    let twins = Twins::new(&[
        "qemu-img create -q -f raw base 1M",
        "qemu-img create -q -f qcow2 -b base -F raw disk",
    ]);
    std::fs::write(twins.ours("base"), [7; 1 << 20]).unwrap();
    for name in ["base", "disk"] {
        std::fs::hard_link(twins.ours(name), twins.ours(&format!("{name}.link"))).unwrap();
        let before = std::fs::read(twins.ours(name)).unwrap();
        for target in [
            name.to_owned(),
            format!("{name}.link"),
            format!("file:{name}.link"),
        ] {
            for option in ["-q", "-n", "-W"] {
                let words = [
                    "convert", "-U", option, "-f", "qcow2", "-O", "raw", "disk", &target,
                ];
                let answer = twins.run_ours(&words);
                assert_eq!(answer.code, Some(1), "{target} {option}: {answer:?}");
                assert!(answer.err.contains("is the same file as"), "{answer:?}");
                assert!(
                    std::fs::read(twins.ours(name)).unwrap() == before,
                    "{target} {option}"
                );
            }
        }
    }
}

/// Creating an image empties its file, also where that is the backing file by another name.
#[test]
fn an_image_on_its_own_file_is_not_created() {
    let twins = Twins::new(&["qemu-img create -q -f qcow2 base 1M"]);
    std::fs::hard_link(twins.ours("base"), twins.ours("link")).unwrap();
    std::os::unix::fs::symlink("base", twins.ours("symbolic")).unwrap();
    let before = std::fs::read(twins.ours("base")).unwrap();
    for name in ["link", "symbolic", "./base", "file:link"] {
        for option in ["-q", "-u"] {
            let words = [
                "create", option, "-f", "qcow2", "-b", "base", "-F", "qcow2", name, "1M",
            ];
            let answer = twins.run_ours(&words);
            assert_eq!(answer.code, Some(1), "{name} {option}: {answer:?}");
            assert!(answer.err.contains("is the same file as"), "{answer:?}");
            assert!(std::fs::read(twins.ours("base")).unwrap() == before);
        }
    }
    twins.same("create -q -f qcow2 -b base -F qcow2 middle");
    let json = r#"json:{"file":{"driver":"file","filename":"base"}}"#;
    for backing in ["middle", json] {
        let words = [
            "create", "-q", "-f", "qcow2", "-b", backing, "-F", "qcow2", "base",
        ];
        let answer = twins.run_ours(&words);
        assert_eq!(answer.code, Some(1), "{backing}: {answer:?}");
        assert!(answer.err.contains("is the same file as"), "{answer:?}");
        assert!(std::fs::read(twins.ours("base")).unwrap() == before);
    }
}

/// The same for the file that takes an image's data.
#[test]
fn an_external_data_file_in_the_backing_chain_is_not_created() {
    let twins = Twins::new(&[
        "qemu-img create -q -f qcow2 base 1M",
        "qemu-img create -q -f qcow2 -b base -F qcow2 middle",
    ]);
    std::fs::hard_link(twins.ours("base"), twins.ours("link")).unwrap();
    let before = std::fs::read(twins.ours("base")).unwrap();
    for (backing, data) in [("base", "base"), ("base", "link"), ("middle", "base")] {
        let data = format!("data_file={data}");
        let words = [
            "create", "-q", "-f", "qcow2", "-b", backing, "-F", "qcow2", "-o", &data, "new", "1M",
        ];
        let answer = twins.run_ours(&words);
        assert_eq!(answer.code, Some(1), "{backing} {data}: {answer:?}");
        assert!(answer.err.contains("is the same file as"), "{answer:?}");
        assert!(std::fs::read(twins.ours("base")).unwrap() == before);
        assert!(!twins.ours("new").exists());
    }
}

/// A node between hides whose file it is; the name of the graph says so.
#[test]
fn a_file_below_other_nodes_is_not_created_anew() {
    let twins = Twins::new(&["qemu-img create -q -f qcow2 base 1M"]);
    std::fs::hard_link(twins.ours("base"), twins.ours("link")).unwrap();
    let before = std::fs::read(twins.ours("base")).unwrap();
    let file = r#""file":{"driver":"file","filename":"base"}"#;
    let graphs = [
        format!(r#"json:{{"driver":"qcow2","file":{{"driver":"raw",{file}}}}}"#),
        format!(r#"json:{{"driver":"qcow2","file":{{"driver":"blkdebug","image":{{{}}}}}}}"#, &file[8..file.len() - 1]),
        r#"json:{"driver":"qcow2","file.driver":"raw","file.file.filename":"base","file.file.driver":"file"}"#
            .to_owned(),
    ];
    for graph in graphs {
        for (name, option) in [("link", "size=1M"), ("new", "data_file=link")] {
            let words = [
                "create", "-q", "-f", "qcow2", "-b", &graph, "-F", "qcow2", "-o", option, name,
            ];
            let answer = twins.run_ours(&words);
            assert_eq!(answer.code, Some(1), "{graph} {name}: {answer:?}");
            assert!(answer.err.contains("is the same file as"), "{answer:?}");
            assert!(std::fs::read(twins.ours("base")).unwrap() == before);
        }
    }
}

#[test]
fn a_failed_create_leaves_no_file() {
    let twins = Twins::new(&[]);
    let answer = twins.run_ours(&["create", "-f", "qcow2", "-o", "data_file=none/d", "x", "1M"]);
    assert_eq!(answer.code, Some(1));
    assert!(!twins.ours("x").exists());
}

#[test]
fn a_bad_configuration_is_named_by_file_and_line() {
    let twins = Twins::new(&["qemu-img create -q -f qcow2 disk 1M"]);
    let config = twins.ours("config.toml");
    std::fs::write(&config, "[qcow2]\nl2-cache-size = \"much\"\n").unwrap();
    let output = Command::new(twins.ours("../bin/qemu-img"))
        .args(["map", "disk"])
        .current_dir(twins.ours(""))
        .env("VELLUM_CONFIG", &config)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8_lossy(&output.stderr);
    let place = format!("{}:2: 'much': not a size", config.display());
    assert!(message.contains(&place), "{message}");
}

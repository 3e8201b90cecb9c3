//! What people meet who call the program by its own name: help on everything, errors that
//! name the command, a broken chain as far as it goes, completions.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use vellum_testing::{Folder, Said};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");
const QEMU: [&str; 4] = ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"];

fn folder(lines: &[&str]) -> Folder {
    let folder = Folder::new(VELLUM);
    for line in lines {
        folder.must("vellum", *line);
    }
    folder
}

/// The words that `vellum --help` lists.
fn commands() -> Vec<String> {
    let help = folder(&[]).must("vellum", "--help");
    let lines = help.lines().filter_map(|line| line.strip_prefix("  "));
    let names = lines.filter_map(|line| line.split_once(" - "));
    names.map(|(name, _)| name.to_owned()).collect()
}

#[test]
fn every_command_has_help_in_every_spelling() {
    let folder = Folder::new(VELLUM);
    let commands = commands();
    assert!(commands.len() > 20, "{commands:?}");
    let all = folder.must("vellum", "--help");
    for words in [
        &["help"][..],
        &["-h"],
        &["help", "help"],
        &["help", "--help"],
    ] {
        assert_eq!(folder.run("vellum", words).out, all, "{words:?}");
    }
    for command in commands.iter().filter(|command| *command != "help") {
        let words: Vec<&str> = command.split(' ').collect();
        let with =
            |first: &[&str], last: &[&str]| folder.run("vellum", &[first, &words, last].concat());
        let direct = with(&[], &["--help"]);
        assert_eq!(direct.code, Some(0), "{command}");
        assert!(
            direct.out.contains(&format!("vellum {command}")),
            "{command}"
        );
        for asked in [
            with(&["help"], &[]),
            with(&["--help"], &[]),
            with(&[], &["-h"]),
        ] {
            assert_eq!(asked.out, direct.out, "{command}");
            assert_eq!(asked.code, Some(0), "{command}");
        }
    }
    let config = folder.run("vellum", "help config").out;
    assert!(
        config.contains("config.toml") && config.contains("l2-cache-size"),
        "{config}"
    );
    let unknown = folder.run("vellum", "help frobnicate").expect(1);
    assert!(unknown.err.contains("Command not found: frobnicate"));
}

/// By our own name an error says which command speaks, and where help is; no other
/// program's name comes up.
#[test]
fn errors_name_the_command() {
    let folder = folder(&[]);
    for command in commands() {
        let words: Vec<&str> = command.split(' ').chain(["--frobnicate"]).collect();
        if command == "help" {
            continue;
        }
        let output = folder.run("vellum", &words);
        let error = output.err;
        assert_eq!(output.code, Some(1), "{command}: {error}");
        assert!(
            error.starts_with(&format!("vellum {command}: ")),
            "{command}: {error}"
        );
        let help = format!("Try 'vellum {command} --help' for more info\n");
        assert!(error.ends_with(&help), "{command}: {error}");
        assert!(!error.contains("qemu"), "{command}: {error}");
    }
    for (words, expected) in [
        (&["nbd"][..], "vellum nbd: Expecting one image file name"),
        (&["convert"], "vellum convert: Must specify image file name"),
        (&["dd", "x"], "vellum dd: unrecognized operand x"),
        (
            &["bitmap", "--add", "x"],
            "vellum bitmap: Expecting filename and bitmap name",
        ),
        (
            &["img", "bench"],
            "vellum img bench: Expecting one image file name",
        ),
        (
            &["io", "a", "b"],
            "vellum io: Expecting one image file name",
        ),
        (&["completions"], "vellum completions: Expecting a shell"),
        (&["man", "--x"], "vellum man: Expecting a folder"),
        (
            &["install-links"],
            "vellum install-links: Expecting a folder",
        ),
    ] {
        let error = folder.run("vellum", words).err;
        assert!(error.starts_with(expected), "{words:?}: {error}");
        assert!(
            error.contains("--help' for more info"),
            "{words:?}: {error}"
        );
    }
    // Nothing is said twice in a row.
    let error = folder.run("vellum", "info none").err;
    let once = "vellum info: Could not open 'none': No such file or directory\n";
    assert_eq!(error, once);
    assert!(folder.names().is_empty());
}

#[test]
fn qemus_names_know_nothing_of_it() {
    let folder = folder(&[]);
    for name in QEMU {
        let error = folder.run(&format!("our {name}"), "--frobnicate").err;
        assert!(
            error.starts_with(&format!("{name}: unrecognized")),
            "{error}"
        );
    }
    for words in [&["help"][..], &["version"], &["__complete"]] {
        let output = folder.run("our qemu-img", words);
        let error = output.err;
        assert_eq!(output.code, Some(1));
        assert!(
            error.starts_with("qemu-img: Command not found: "),
            "{error}"
        );
    }
    let help = folder.run("our qemu-img", "convert --help").out;
    assert!(!help.contains("Examples"), "{help}");
    let error = folder.run("our qemu-img", "info none").err;
    let twice =
        "qemu-img: Could not open 'none': Could not open 'none': No such file or directory\n";
    assert_eq!(error, twice);
}

const CHAIN: &[&str] = &[
    "create -q -f qcow2 base 1M",
    "create -q -f qcow2 -b base -F qcow2 mid",
    "create -q -f qcow2 -b mid -F qcow2 top",
];

/// A chain without its base: what opens is shown, and who names what is missing; the
/// command that is printed mends it.
#[test]
fn a_broken_chain_is_shown_as_far_as_it_goes_and_mended_as_told() {
    let folder = folder(CHAIN);
    let path = |name: &str| folder.path(name);
    std::fs::create_dir(path("old")).unwrap();
    std::fs::rename(path("base"), path("old/base")).unwrap();
    let output = folder
        .run("vellum", "info --backing-chain --output=json top")
        .expect(1);
    let value: Value = output.json();
    let names: Vec<_> = value
        .as_array()
        .unwrap()
        .iter()
        .map(|i| i["filename"].as_str())
        .collect();
    assert_eq!(names, [Some("top"), Some("mid")]);
    let output = folder.run("vellum", "info --backing-chain top").expect(1);
    let shown = output.out;
    assert!(
        shown.contains("image: top") && shown.contains("image: mid"),
        "{shown}"
    );
    let error = output.err;
    let expected = "vellum info: The backing file that 'mid' names cannot be used: \
                    Could not open 'base': No such file or directory\n\
                    If that file lies elsewhere: vellum rebase -u -b PLACE -F qcow2 mid\n";
    assert_eq!(error, expected);
    let (_, line) = error
        .trim_end()
        .rsplit_once(": vellum ")
        .expect("a command");
    let line = line.replace("PLACE", "old/base");
    folder.must("vellum", &line);
    let output = folder.run("vellum", "info --backing-chain top").expect(0);
    assert_eq!(output.err, "");
}

/// An image that was moved with its base has the base beside it: that place is told.
#[test]
fn a_base_that_lies_beside_its_overlay_is_found() {
    let folder = folder(&["create -q -f qcow2 base 1M"]);
    let named = folder.path("base").display().to_string();
    folder.must(
        "vellum",
        &format!("create -q -f qcow2 -b {named} -F qcow2 top"),
    );
    let moved = Folder::new(VELLUM);
    for name in ["base", "top"] {
        std::fs::rename(folder.path(name), moved.path(name)).unwrap();
    }
    let error = moved.run("vellum", "info --backing-chain top").err;
    let line = error.rsplit_once(": vellum ").expect("a command").1;
    assert!(!line.contains("PLACE"), "{error}");
    moved.must("vellum", line);
    moved.must("vellum", "info --backing-chain top");
}

/// Other images may stand on the backing file, and nothing that is asked for names it.
#[test]
fn a_commit_writes_only_into_what_is_named() {
    let folder = folder(&[
        "create -q -f qcow2 golden 1M",
        "create -q -f qcow2 -b golden -F qcow2 web 1M",
        "create -q -f qcow2 -b golden -F qcow2 other 1M",
    ]);
    folder.must("vellum", "io -c 'write -q -P 7 0 64k' web");
    let golden = || folder.read("golden");
    let before = golden();
    let why = folder.run("vellum", "commit web").expect(1).err;
    assert!(why.contains("--base") && why.contains("golden"), "{why}");
    assert!(golden() == before, "the golden image is another one");
    folder.must("vellum", "commit -q --base golden web");
    folder.must("vellum", "io -r -c 'read -q -P 7 0 64k' golden");
    // The image is empty, as without a base under QEMU's name.
    let map = folder.run("vellum", "map --output=json web");
    let map: Value = map.json();
    assert_eq!(map[0]["depth"], 1, "{map}");
}

#[test]
fn qemus_name_shows_nothing_of_a_broken_chain() {
    let folder = folder(CHAIN);
    folder.remove("base");
    for words in [
        &["info", "--backing-chain", "top"][..],
        &["info", "--backing-chain", "--output=json", "top"],
    ] {
        let theirs = folder.run("qemu-img", words);
        assert_eq!(folder.run("our qemu-img", words), theirs);
    }
}

/// What a person at a bash prompt gets for a line that ends where the cursor is.
fn in_bash(folder: &Folder, line: &str) -> Vec<String> {
    // As bash cuts a line into words: also at '=' and ':', which are words of their own.
    let script = r#"
        vellum() { "$VELLUM" "$@"; }
        source <(vellum completions bash)
        COMP_LINE=$LINE COMP_POINT=${#LINE} COMP_WORDS=() COMP_WORDBREAKS=$' \t\n"\'><=;|&(:'
        rest=$LINE word=
        while [[ -n $rest ]]; do
            letter=${rest:0:1} rest=${rest:1}
            case $letter in
            ' ') [[ -n $word ]] && COMP_WORDS+=("$word"); word= ;;
            [=:]) [[ -n $word ]] && COMP_WORDS+=("$word"); word=; COMP_WORDS+=("$letter") ;;
            *) word+=$letter ;;
            esac
        done
        [[ $letter == [=:] ]] || COMP_WORDS+=("$word")
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        _vellum
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let mut bash = folder.command("bash", &["--norc", "-c", script]);
    let output = Said::of(bash.env("VELLUM", VELLUM).env("LINE", line));
    assert!(output.err.is_empty(), "{}", output.err);
    output
        .out
        .lines()
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect()
}

#[test]
fn bash_completes_commands_options_and_names_inside_images() {
    let folder = folder(&[
        "create -q -f qcow2 disk 1M",
        "snapshot -c before disk",
        "snapshot -c between disk",
        "bitmap --add disk daily",
    ]);
    for (line, expected) in [
        ("vellum insp", &["inspect"][..]),
        ("vellum convert -O qc", &["qcow2"]),
        ("vellum info --output=js", &["json"]),
        (
            "vellum create -f qcow2 -o cluster_size=64k,lazy",
            &["64k,lazy_refcounts="],
        ),
        (
            "vellum create -f qcow2 -o compression_type=",
            &["zlib", "zstd"],
        ),
        ("vellum snapshot disk -d be", &["before", "between"]),
        ("vellum snapshot disk -a betw", &["between"]),
        ("vellum bitmap --remove disk ", &["daily"]),
        ("vellum nbd disk -B ", &["daily"]),
        ("vellum snapshot missing -d ", &[]),
        ("vellum info dis", &[]),
    ] {
        assert_eq!(in_bash(&folder, line), expected, "{line}");
    }
}

/// An image that somebody writes is asked all the same, and nothing is said of it.
#[test]
fn names_are_found_in_an_image_that_is_in_use() {
    let folder = folder(&["create -q -f qcow2 disk 1M", "snapshot -c before disk"]);
    let mut user = folder.command("vellum", "io -f qcow2 disk");
    let user = user.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut user = user.spawn().unwrap();
    // The prompt comes when the image is open.
    let mut first = [0];
    std::io::Read::read_exact(user.stdout.as_mut().unwrap(), &mut first).unwrap();
    let words = ["__complete", "vellum", "3", "snapshot", "disk", "-d", ""];
    let output = folder.run("vellum", &words);
    drop(user.stdin.take());
    user.wait().unwrap();
    assert_eq!(output.out, "before\tsnapshot 1\n:end\n");
    assert!(output.err.is_empty());
}

/// Shells that are here take the scripts; `fish` completes with its own.
#[test]
fn other_shells_take_their_scripts() {
    let folder = folder(&["create -q -f qcow2 disk 1M", "snapshot -c before disk"]);
    for shell in ["bash", "zsh", "fish"] {
        for program in ["vellum"].iter().chain(&QEMU) {
            let output = folder
                .run("vellum", &["completions", shell, program])
                .expect(0);
            let script = folder.path("script");
            folder.write("script", &output.out);
            let Ok(checked) = Command::new(shell).arg("-n").arg(&script).output() else {
                continue;
            };
            assert!(checked.status.success(), "{shell} {program}: {checked:?}");
        }
    }
    let lines =
        format!("{VELLUM} completions fish | source; complete -C 'vellum snapshot disk -d b'");
    let path = format!(
        "{}:{}",
        Path::new(VELLUM).parent().unwrap().display(),
        std::env::var("PATH").unwrap_or_default()
    );
    let mut fish = folder.command("fish", &["-c", &lines]);
    if let Ok(output) = fish.env("PATH", path).output() {
        let output = Said::from(&output);
        assert_eq!(output.out, "before\tsnapshot 1\n", "{output:?}");
    }
}

/// A download that broke off: nobody takes zeroes for the disk without being told.
#[test]
fn a_file_that_was_cut_short_is_told() {
    let folder = folder(&["create -q -f qcow2 base.qcow2 8M"]);
    let write = |what: &str| {
        let words = ["io", "-f", "qcow2", "-c", what, "base.qcow2"];
        folder.must("vellum", &words);
    };
    write("write -q 0 8M");
    let mut bytes = folder.read("base.qcow2");
    bytes.truncate(1 << 20);
    folder.write("base.qcow2", &bytes);
    let run = |line: &str| folder.run("vellum", line);
    folder.must(
        "vellum",
        "create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2",
    );
    let words = "the file is cut short: 7667712 of 8454144 referenced bytes are missing";
    for source in ["base.qcow2", "top.qcow2"] {
        let refused = folder.refused("vellum", &format!("convert -O raw {source} out.raw"));
        assert!(refused.contains(words), "{refused}");
        assert!(!folder.has("out.raw"));
    }
    folder.must("vellum", "create -q -f qcow2 other.qcow2 8M");
    for line in [
        "commit --base base.qcow2 top.qcow2",
        "rebase -b other.qcow2 -F qcow2 top.qcow2",
    ] {
        let refused = folder.refused("vellum", line);
        assert!(refused.contains(words), "{refused}");
        assert!(folder.read("base.qcow2") == bytes);
    }
    let told = run("check base.qcow2").expect(2).err;
    assert!(told.contains(words), "{told}");
    for command in ["inspect", "audit"] {
        let told = run(&format!("{command} base.qcow2")).out;
        // Lines are broken where the screen ends.
        let told: Vec<&str> = told.split_whitespace().collect();
        assert!(told.join(" ").contains(words), "{told:?}");
    }
    folder.must(
        "vellum",
        "convert --accept-missing -O raw base.qcow2 out.raw",
    );
    folder.must("our qemu-img", "convert -O raw base.qcow2 qemu.raw");
    // One write makes the file as long as it was.
    write("write -q 8128k 64k");
    run("check base.qcow2").expect(2);
    let refused = folder.refused("vellum", "convert -O raw base.qcow2 again.raw");
    let words = "was cut short before it grew again";
    assert!(refused.contains(words), "{refused}");
}

//! What people meet who call the program by its own name: help on everything, errors that
//! name the command, a broken chain as far as it goes, completions.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");
const QEMU: [&str; 4] = ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"];

fn run(program: &Path, folder: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(words).current_dir(folder).env("LC_ALL", "C");
    let output = command.stdin(Stdio::null()).output();
    output.expect("the program runs")
}

fn vellum(folder: &Path, words: &[&str]) -> Output {
    run(Path::new(VELLUM), folder, words)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn folder(lines: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for line in lines {
        let words: Vec<&str> = line.split_whitespace().collect();
        let output = vellum(folder.path(), &words);
        assert!(output.status.success(), "{line}: {output:?}");
    }
    folder
}

/// The words that `vellum --help` lists.
fn commands() -> Vec<String> {
    let help = text(&vellum(Path::new("."), &["--help"]).stdout);
    let lines = help.lines().filter_map(|line| line.strip_prefix("  "));
    let names = lines.filter_map(|line| line.split_once(" - "));
    names.map(|(name, _)| name.to_owned()).collect()
}

#[test]
fn every_command_has_help_in_every_spelling() {
    let here = Path::new(".");
    let commands = commands();
    assert!(commands.len() > 20, "{commands:?}");
    let all = vellum(here, &["--help"]).stdout;
    for words in [
        &["help"][..],
        &["-h"],
        &["help", "help"],
        &["help", "--help"],
    ] {
        assert_eq!(text(&vellum(here, words).stdout), text(&all), "{words:?}");
    }
    for command in commands.iter().filter(|command| *command != "help") {
        let words: Vec<&str> = command.split(' ').collect();
        let with = |first: &[&str], last: &[&str]| vellum(here, &[first, &words, last].concat());
        let direct = with(&[], &["--help"]);
        assert_eq!(direct.status.code(), Some(0), "{command}");
        assert!(
            text(&direct.stdout).contains(&format!("vellum {command}")),
            "{command}"
        );
        for asked in [
            with(&["help"], &[]),
            with(&["--help"], &[]),
            with(&[], &["-h"]),
        ] {
            assert_eq!(text(&asked.stdout), text(&direct.stdout), "{command}");
            assert_eq!(asked.status.code(), Some(0), "{command}");
        }
    }
    let config = text(&vellum(here, &["help", "config"]).stdout);
    assert!(
        config.contains("config.toml") && config.contains("l2-cache-size"),
        "{config}"
    );
    let unknown = vellum(here, &["help", "frobnicate"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(text(&unknown.stderr).contains("Command not found: frobnicate"));
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
        let output = vellum(folder.path(), &words);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{command}: {error}");
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
        let error = text(&vellum(folder.path(), words).stderr);
        assert!(error.starts_with(expected), "{words:?}: {error}");
        assert!(
            error.contains("--help' for more info"),
            "{words:?}: {error}"
        );
    }
    // Nothing is said twice in a row.
    let error = text(&vellum(folder.path(), &["info", "none"]).stderr);
    let once = "vellum info: Could not open 'none': No such file or directory\n";
    assert_eq!(error, once);
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none());
}

#[test]
fn qemus_names_know_nothing_of_it() {
    let folder = folder(&[]);
    for name in QEMU {
        let link = folder.path().join(name);
        std::os::unix::fs::symlink(VELLUM, &link).unwrap();
        let error = text(&run(&link, folder.path(), &["--frobnicate"]).stderr);
        assert!(
            error.starts_with(&format!("{name}: unrecognized")),
            "{error}"
        );
    }
    let img = folder.path().join("qemu-img");
    for words in [&["help"][..], &["version"], &["__complete"]] {
        let output = run(&img, folder.path(), words);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1));
        assert!(
            error.starts_with("qemu-img: Command not found: "),
            "{error}"
        );
    }
    let help = text(&run(&img, folder.path(), &["convert", "--help"]).stdout);
    assert!(!help.contains("Examples"), "{help}");
    let error = text(&run(&img, folder.path(), &["info", "none"]).stderr);
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
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir(path("old")).unwrap();
    std::fs::rename(path("base"), path("old/base")).unwrap();
    let output = vellum(
        folder.path(),
        &["info", "--backing-chain", "--output=json", "top"],
    );
    assert_eq!(output.status.code(), Some(1));
    let value: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let names: Vec<_> = value
        .as_array()
        .unwrap()
        .iter()
        .map(|i| i["filename"].as_str())
        .collect();
    assert_eq!(names, [Some("top"), Some("mid")]);
    let output = vellum(folder.path(), &["info", "--backing-chain", "top"]);
    assert_eq!(output.status.code(), Some(1));
    let shown = text(&output.stdout);
    assert!(
        shown.contains("image: top") && shown.contains("image: mid"),
        "{shown}"
    );
    let error = text(&output.stderr);
    let expected = "vellum info: The backing file that 'mid' names cannot be used: \
                    Could not open 'base': No such file or directory\n\
                    If that file lies elsewhere: vellum rebase -u -b PLACE -F qcow2 mid\n";
    assert_eq!(error, expected);
    let (_, line) = error
        .trim_end()
        .rsplit_once(": vellum ")
        .expect("a command");
    let line = line.replace("PLACE", "old/base");
    let words: Vec<&str> = line.split(' ').collect();
    assert!(vellum(folder.path(), &words).status.success(), "{line}");
    let output = vellum(folder.path(), &["info", "--backing-chain", "top"]);
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
}

/// An image that was moved with its base has the base beside it: that place is told.
#[test]
fn a_base_that_lies_beside_its_overlay_is_found() {
    let folder = folder(&["create -q -f qcow2 base 1M"]);
    let named = folder.path().join("base").display().to_string();
    let create = [
        "create", "-q", "-f", "qcow2", "-b", &named, "-F", "qcow2", "top",
    ];
    assert!(vellum(folder.path(), &create).status.success());
    let moved = tempfile::tempdir().unwrap();
    for name in ["base", "top"] {
        std::fs::rename(folder.path().join(name), moved.path().join(name)).unwrap();
    }
    let output = vellum(moved.path(), &["info", "--backing-chain", "top"]);
    let error = text(&output.stderr);
    let line = error.rsplit_once(": vellum ").expect("a command").1;
    let words: Vec<&str> = line.split_whitespace().collect();
    assert!(!line.contains("PLACE"), "{error}");
    assert!(vellum(moved.path(), &words).status.success(), "{line}");
    let output = vellum(moved.path(), &["info", "--backing-chain", "top"]);
    assert!(output.status.success(), "{output:?}");
}

/// Other images may stand on the backing file, and nothing that is asked for names it.
#[test]
fn a_commit_writes_only_into_what_is_named() {
    let folder = folder(&[
        "create -q -f qcow2 golden 1M",
        "create -q -f qcow2 -b golden -F qcow2 web 1M",
        "create -q -f qcow2 -b golden -F qcow2 other 1M",
    ]);
    let written = ["io", "-c", "write -q -P 7 0 64k", "web"];
    assert!(vellum(folder.path(), &written).status.success());
    let golden = || std::fs::read(folder.path().join("golden")).expect("the image");
    let before = golden();
    let refused = vellum(folder.path(), &["commit", "web"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let why = text(&refused.stderr);
    assert!(why.contains("--base") && why.contains("golden"), "{why}");
    assert!(golden() == before, "the golden image is another one");
    let done = vellum(folder.path(), &["commit", "-q", "--base", "golden", "web"]);
    assert!(done.status.success(), "{done:?}");
    let read = ["io", "-r", "-c", "read -q -P 7 0 64k", "golden"];
    let read = vellum(folder.path(), &read);
    assert!(read.status.success(), "{read:?}");
    // The image is empty, as without a base under QEMU's name.
    let map = vellum(folder.path(), &["map", "--output=json", "web"]);
    let map: Value = serde_json::from_slice(&map.stdout).expect("JSON");
    assert_eq!(map[0]["depth"], 1, "{map}");
}

#[test]
fn qemus_name_shows_nothing_of_a_broken_chain() {
    let folder = folder(CHAIN);
    std::fs::remove_file(folder.path().join("base")).unwrap();
    let link = folder.path().join("qemu-img");
    std::os::unix::fs::symlink(VELLUM, &link).unwrap();
    for words in [
        &["info", "--backing-chain", "top"][..],
        &["info", "--backing-chain", "--output=json", "top"],
    ] {
        let ours = run(&link, folder.path(), words);
        let theirs = run(Path::new("qemu-img"), folder.path(), words);
        assert_eq!(ours.status.code(), theirs.status.code());
        assert_eq!(
            (text(&ours.stdout), text(&ours.stderr)),
            (text(&theirs.stdout), text(&theirs.stderr))
        );
    }
}

/// What a person at a bash prompt gets for a line that ends where the cursor is.
fn in_bash(folder: &Path, line: &str) -> Vec<String> {
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
    let output = Command::new("bash")
        .args(["--norc", "-c", script])
        .env("VELLUM", VELLUM)
        .env("LINE", line)
        .current_dir(folder)
        .output()
        .expect("bash");
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    text(&output.stdout)
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
        assert_eq!(in_bash(folder.path(), line), expected, "{line}");
    }
}

/// An image that somebody writes is asked all the same, and nothing is said of it.
#[test]
fn names_are_found_in_an_image_that_is_in_use() {
    let folder = folder(&["create -q -f qcow2 disk 1M", "snapshot -c before disk"]);
    let mut user = Command::new(VELLUM)
        .args(["io", "-f", "qcow2", "disk"])
        .current_dir(folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The prompt comes when the image is open.
    let mut first = [0];
    std::io::Read::read_exact(user.stdout.as_mut().unwrap(), &mut first).unwrap();
    let words = ["__complete", "vellum", "3", "snapshot", "disk", "-d", ""];
    let output = vellum(folder.path(), &words);
    drop(user.stdin.take());
    user.wait().unwrap();
    assert_eq!(text(&output.stdout), "before\tsnapshot 1\n:end\n");
    assert!(output.stderr.is_empty());
}

/// Shells that are here take the scripts; `fish` completes with its own.
#[test]
fn other_shells_take_their_scripts() {
    let folder = folder(&["create -q -f qcow2 disk 1M", "snapshot -c before disk"]);
    for shell in ["bash", "zsh", "fish"] {
        for program in ["vellum"].iter().chain(&QEMU) {
            let output = vellum(folder.path(), &["completions", shell, program]);
            assert!(output.status.success(), "{shell} {program}");
            let script = folder.path().join("script");
            std::fs::write(&script, &output.stdout).unwrap();
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
    let mut fish = Command::new("fish");
    fish.args(["-c", &lines])
        .env("PATH", path)
        .current_dir(folder.path());
    if let Ok(output) = fish.output() {
        assert_eq!(text(&output.stdout), "before\tsnapshot 1\n", "{output:?}");
    }
}

/// A download that broke off: nobody takes zeroes for the disk without being told.
#[test]
fn a_file_that_was_cut_short_is_told() {
    let folder = folder(&["create -q -f qcow2 base.qcow2 8M"]);
    let write = |what: &str| {
        let words = ["io", "-f", "qcow2", "-c", what, "base.qcow2"];
        let written = vellum(folder.path(), &words);
        assert!(written.status.success(), "{written:?}");
    };
    write("write -q 0 8M");
    let at = |name: &str| folder.path().join(name);
    let mut bytes = std::fs::read(at("base.qcow2")).expect("an image");
    bytes.truncate(1 << 20);
    std::fs::write(at("base.qcow2"), &bytes).expect("room");
    let run = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        vellum(folder.path(), &words)
    };
    let overlay = "create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2";
    assert!(run(overlay).status.success());
    let words = "the file is cut short: 7667712 of 8454144 referenced bytes are missing";
    for source in ["base.qcow2", "top.qcow2"] {
        let refused = run(&format!("convert -O raw {source} out.raw"));
        assert_eq!(refused.status.code(), Some(1));
        assert!(text(&refused.stderr).contains(words), "{refused:?}");
        assert!(!at("out.raw").exists());
    }
    assert!(run("create -q -f qcow2 other.qcow2 8M").status.success());
    for line in [
        "commit --base base.qcow2 top.qcow2",
        "rebase -b other.qcow2 -F qcow2 top.qcow2",
    ] {
        let refused = run(line);
        assert_eq!(refused.status.code(), Some(1), "{line}: {refused:?}");
        assert!(text(&refused.stderr).contains(words), "{line}: {refused:?}");
        assert!(std::fs::read(at("base.qcow2")).expect("an image") == bytes);
    }
    let told = run("check base.qcow2");
    assert_eq!(told.status.code(), Some(2));
    assert!(text(&told.stderr).contains(words), "{told:?}");
    for command in ["inspect", "audit"] {
        let told = text(&run(&format!("{command} base.qcow2")).stdout);
        // Lines are broken where the screen ends.
        let told: Vec<&str> = told.split_whitespace().collect();
        assert!(told.join(" ").contains(words), "{told:?}");
    }
    let accepted = run("convert --accept-missing -O raw base.qcow2 out.raw");
    assert!(accepted.status.success(), "{accepted:?}");
    let qemu = folder.path().join("qemu-img");
    std::os::unix::fs::symlink(VELLUM, &qemu).expect("a link");
    let same = run_as(&qemu, folder.path(), "convert -O raw base.qcow2 qemu.raw");
    assert!(same.status.success(), "{same:?}");
    // One write makes the file as long as it was.
    write("write -q 8128k 64k");
    let told = run("check base.qcow2");
    assert_eq!(told.status.code(), Some(2), "{told:?}");
    let refused = run("convert -O raw base.qcow2 again.raw");
    assert_eq!(refused.status.code(), Some(1));
    let words = "was cut short before it grew again";
    assert!(text(&refused.stderr).contains(words), "{refused:?}");
}

fn run_as(program: &Path, folder: &Path, line: &str) -> Output {
    let words: Vec<&str> = line.split_whitespace().collect();
    run(program, folder, &words)
}

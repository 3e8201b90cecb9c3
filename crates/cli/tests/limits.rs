//! Limits of the process (`ulimit`): threads, descriptors, memory and file sizes. A command does its work or reports
//! an error. It neither hangs, panics nor is killed, and what it reads stays as it was.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use std::{fs, process};

use tempfile::TempDir;

static RUNS: AtomicU32 = AtomicU32::new(0);

const DISK_BYTES: usize = 1 << 20;

/// A command, and a shell line that proves its work if it says that it has done it.
struct Case {
    words: &'static str,
    proof: &'static str,
}

const fn case(words: &'static str, proof: &'static str) -> Case {
    Case { words, proof }
}

/// `disk` and `raw` hold the same, as do `top` and `changed`; `old` is a repository that holds `disk`.
const CASES: &[Case] = &[
    case("amend -q -o lazy_refcounts=on disk", "$V check -q disk"),
    case("audit disk", ""),
    case("bitmap --add disk daily", "$V check -q disk"),
    case("check -q top", ""),
    case("check -q -r all top", "$V compare -q top changed"),
    case("commit -q -b disk top", "$V compare -q changed disk"),
    case("compact -q disk", "$V compare -q raw disk"),
    case("compare -q raw disk", ""),
    case("convert -q -O raw disk out", "$V compare -q raw out"),
    case("convert -q -O qcow2 raw out", "$V compare -q raw out"),
    case(
        "convert -q -c -O qcow2 top out",
        "$V compare -q changed out",
    ),
    case("convert -q -O vmdk disk out", "$V compare -q raw out"),
    case("convert -q -O vhdx disk out", "$V compare -q raw out"),
    case(
        "convert -q --journal -O qcow2 disk out",
        "$V compare -q raw out",
    ),
    case("create -q -f qcow2 out 64M", "$V check -q out"),
    case(
        "create -q -f qcow2 -o preallocation=full out 1M",
        "$V check -q out",
    ),
    case("create -q -f raw out 64M", ""),
    case("dd -O qcow2 if=disk of=out", "$V compare -q raw out"),
    case("info --backing-chain top", ""),
    case("inspect disk", ""),
    case("map top", ""),
    case("measure -O qcow2 top", ""),
    case("pull -q old:disk out", "$V compare -q raw out"),
    case(
        "push -q top old:top",
        "$V pull -q old:top out && $V compare -q changed out",
    ),
    case("rebase -q -b raw -F raw top", "$V compare -q top changed"),
    case("receive -q out", ""),
    case("repo list old", ""),
    case("repo verify old", ""),
    case(
        "repo gc old",
        "$V pull -q old:disk out && $V compare -q raw out",
    ),
    case("resize -q top 2M", "$V check -q top"),
    case("seal -q disk", "$V verify -q disk"),
    case(
        "send -q -o out disk",
        "$V receive -q copy <out && $V compare -q raw copy",
    ),
    case("snapshot -c first disk", "$V check -q disk"),
    case("io -c flush disk", ""),
];

fn shell(folder: &Path, line: &str) -> Output {
    let mut command = Command::new("bash");
    command.args(["-ec", line]).current_dir(folder);
    command.env("V", env!("CARGO_BIN_EXE_vellum"));
    command.output().expect("bash")
}

/// A folder that another user may write to, with the program in it.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("vellum");
    let built = Path::new(env!("CARGO_BIN_EXE_vellum"));
    fs::hard_link(built, &program)
        .or_else(|_| fs::copy(built, &program).map(drop))
        .expect("the program");
    let open = fs::Permissions::from_mode(0o777);
    fs::set_permissions(folder.path(), open).expect("permissions");
    folder
}

/// A folder with all that the cases use.
fn images() -> TempDir {
    let folder = folder();
    let pattern: Vec<u8> = (0..DISK_BYTES).map(|at| (at >> 9) as u8 | 1).collect();
    fs::write(folder.path().join("raw"), &pattern).expect("a file");
    let made = shell(
        folder.path(),
        "$V convert -q -f raw -O qcow2 raw disk
         $V create -q -f qcow2 -b disk -F qcow2 top
         $V io -f qcow2 -c 'write -q -P 9 64k 300k' top
         $V convert -q -O qcow2 top changed
         $V push -q disk old:disk
         $V send -q -o stream disk
         chmod -R a+rwX .",
    );
    assert!(made.status.success(), "{made:?}");
    folder
}

/// Runs a command with limits as `prlimit` takes them. Root has no limit of threads, so another user runs it then.
/// After a minute it is killed.
fn limited(folder: &Path, limits: &str, backend: &str, words: &[&str]) -> Output {
    let mut command = Command::new("prlimit");
    command.arg(limits);
    if limits.contains("nproc") && rustix::process::geteuid().is_root() {
        // All threads of a user count, also those that ended a moment ago: every run has a user of its own.
        let run = RUNS.fetch_add(1, Ordering::Relaxed);
        let user = 2_000_000 + process::id() * 4096 + run % 4096;
        command.args(["setpriv", "--clear-groups"]);
        command.args([format!("--reuid={user}"), format!("--regid={user}")]);
    }
    command.arg("./vellum").args(words);
    let stdin = match words[0] {
        "receive" => fs::File::open(folder.join("stream"))
            .expect("a stream")
            .into(),
        _ => Stdio::null(),
    };
    command
        .current_dir(folder)
        .env("VELLUM_LANE", backend)
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut running = command.spawn().expect("prlimit");
    let until = Instant::now() + Duration::from_secs(60);
    while running.try_wait().expect("a status").is_none() {
        if Instant::now() > until {
            running.kill().expect("killed");
            panic!("it hangs: {:?}", running.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    running.wait_with_output().expect("its output")
}

/// The error, unless the command has succeeded.
#[track_caller]
fn refusal(done: &Output) -> Option<String> {
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    match done.status.code() {
        Some(0) => None,
        Some(1) => Some(said),
        code => panic!("{code:?}: {said}"),
    }
}

/// The names in a folder that a case may not leave more of, if it fails.
fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
    entries
        .map(|entry| name(entry).to_string_lossy().into_owned())
        .collect()
}

/// Plays all cases under a limit. Returns how many of them failed.
fn all_under(limits: &str) -> usize {
    CASES
        .iter()
        .filter(|case| {
            let folder = images();
            let before = names(folder.path());
            let words: Vec<&str> = case.words.split(' ').collect();
            let done = limited(folder.path(), limits, "auto", &words);
            let code = done.status.code();
            let said = String::from_utf8_lossy(&done.stderr);
            let what = format!("{limits} vellum {}: {code:?} {said}", case.words);
            // `check`, `audit` and `verify` have codes of their own for what cannot be told.
            assert!(matches!(code, Some(0..=2 | 63)), "{what}");
            assert!(!said.contains("panicked"), "{what}");
            if code == Some(0) {
                let proof = shell(folder.path(), case.proof);
                assert!(proof.status.success(), "{what}: {proof:?}");
                return false;
            }
            let is_told = !said.trim().is_empty() || !done.stdout.is_empty();
            assert!(is_told, "{what}: no reason is given");
            let sound = "$V compare -q raw disk && $V compare -q changed top && $V repo verify old";
            let sound = match case.words.starts_with("commit") {
                // Part of it may be in the base, as after any interrupted commit.
                true => "$V check -q disk && $V compare -q changed top",
                false => sound,
            };
            let sound = shell(folder.path(), sound);
            assert!(sound.status.success(), "{what}: {sound:?}");
            // What is half done is gone on with later.
            let resumes = ["send", "receive", "--journal"];
            let is_resumed = words.iter().any(|word| resumes.contains(word));
            let is_kept = |name: &&String| is_resumed && name.starts_with("out");
            let names = names(folder.path());
            let left = names.difference(&before).filter(|name| !is_kept(name));
            let left: Vec<&String> = left.collect();
            assert!(left.is_empty(), "{what}: leaves {left:?}");
            true
        })
        .count()
}

#[test]
fn no_command_panics_without_threads() {
    for threads in [1, 2, 4] {
        all_under(&format!("--nproc={threads}"));
    }
}

#[test]
fn no_command_panics_without_descriptors() {
    // Three are those of standard input and output.
    for descriptors in [4, 5, 7, 9, 12] {
        let failed = all_under(&format!("--nofile={descriptors}:{descriptors}"));
        assert!(descriptors > 4 || failed > 20, "{failed}");
    }
    assert_eq!(all_under("--nofile=32:32"), 0);
}

#[test]
fn no_command_panics_beyond_the_largest_file() {
    for len_bytes in [0, 4096, 100_000, 900_000] {
        let failed = all_under(&format!("--fsize={len_bytes}"));
        assert!(failed > 3, "{failed}");
    }
}

#[test]
fn no_command_needs_much_memory() {
    assert_eq!(all_under(&format!("--as={}", 1 << 30)), 0);
}

#[test]
fn images_are_made_and_copied_without_a_thread() {
    for backend in ["auto", "threads"] {
        for threads in 1..4 {
            let folder = folder();
            let pattern: Vec<u8> = (0..4 << 20).map(|at: u32| (at >> 9) as u8).collect();
            fs::write(folder.path().join("raw"), &pattern).expect("a file");
            for words in [
                "create -q -f qcow2 new 64M",
                "create -q -f raw plain 64M",
                "convert -q -f raw -O qcow2 raw a",
                "convert -q -c -O qcow2 a b",
                "check -q b",
                "compare -q raw b",
            ] {
                let words: Vec<&str> = words.split(' ').collect();
                let limits = format!("--nproc={threads}");
                let done = limited(folder.path(), &limits, backend, &words);
                assert_eq!(refusal(&done), None, "{backend} {threads} {words:?}");
            }
        }
    }
}

#[test]
fn a_server_is_not_asked_without_a_thread() {
    for threads in 1..6 {
        let folder = folder();
        let words = ["info", "http://localhost:1/disk"];
        let limits = format!("--nproc={threads}");
        let said = refusal(&limited(folder.path(), &limits, "auto", &words));
        let said = said.expect("nobody listens there");
        let is_right = said.contains("cannot start a thread: ") || said.contains("refused");
        assert!(is_right, "{threads}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        if threads == 1 {
            assert!(said.contains("cannot start a thread: "), "{said}");
        }
    }
}

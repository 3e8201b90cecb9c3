//! Limits of threads (`ulimit -u`): a command does its work, or says that no thread can be started. It neither hangs
//! nor panics.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use std::{fs, process};

use tempfile::TempDir;

static RUNS: AtomicU32 = AtomicU32::new(0);

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

/// Runs a command that may have so many threads; no limit holds for root, so another user runs it then. What takes a
/// minute is ended.
fn limited(folder: &TempDir, threads: usize, backend: &str, words: &[&str]) -> Output {
    let mut command = Command::new("prlimit");
    command.arg(format!("--nproc={threads}"));
    if rustix::process::geteuid().is_root() {
        // One that runs nothing else, not even what has ended a moment ago: all of a user's threads count.
        let run = RUNS.fetch_add(1, Ordering::Relaxed);
        let user = 2_000_000 + process::id() * 64 + run % 64;
        command.args(["setpriv", "--clear-groups"]);
        command.args([format!("--reuid={user}"), format!("--regid={user}")]);
    }
    command.arg("./vellum").args(words);
    command
        .current_dir(folder.path())
        .env("VELLUM_LANE", backend)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut running = command.spawn().expect("prlimit");
    let until = Instant::now() + Duration::from_secs(60);
    while running.try_wait().expect("a status").is_none() {
        if Instant::now() > until {
            running.kill().expect("killed");
            panic!("it hangs: {:?}", running.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    running.wait_with_output().expect("its output")
}

/// What it said, unless it has done its work.
#[track_caller]
fn refusal(done: &Output) -> Option<String> {
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    match done.status.code() {
        Some(0) => None,
        Some(1) => Some(said),
        code => panic!("{code:?}: {said}"),
    }
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
                let done = limited(&folder, threads, backend, &words);
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
        let said = refusal(&limited(&folder, threads, "auto", &words));
        let said = said.expect("nobody listens there");
        let is_right = said.contains("cannot start a thread: ") || said.contains("refused");
        assert!(is_right, "{threads}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        if threads == 1 {
            assert!(said.contains("cannot start a thread: "), "{said}");
        }
    }
}

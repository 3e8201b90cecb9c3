//! `vellum ctl` as people and scripts use it.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{DISK, Served, URI};
use crate::place::PATIENCE;

impl Served {
    fn ctl(&self, words: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_vellum"))
            .current_dir(self.place.root())
            .env("VELLUM_CTL", "unix:ctl")
            .arg("ctl")
            .args(words)
            .output()
            .expect("the program runs")
    }

    /// What a command prints that succeeds.
    fn ctl_says(&self, line: &str) -> String {
        let words: Vec<&str> = line.split_whitespace().collect();
        let output = self.ctl(&words);
        assert!(output.status.success(), "{line}: {output:?}");
        assert!(output.stderr.is_empty(), "{line}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// What a command says that fails.
    fn ctl_fails(&self, line: &str) -> String {
        let words: Vec<&str> = line.split_whitespace().collect();
        let output = self.ctl(&words);
        assert_eq!(output.status.code(), Some(1), "{line}: {output:?}");
        assert!(output.stdout.is_empty(), "{line}: {output:?}");
        String::from_utf8(output.stderr).expect("text")
    }
}

/// The words of the line of a table that begins so.
fn line<'a>(table: &'a str, first: &str) -> Vec<&'a str> {
    let lines = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut lines = lines.filter(|words| words.first() == Some(&first));
    lines
        .next()
        .unwrap_or_else(|| panic!("{first} is not in\n{table}"))
}

#[test]
fn everything_is_shown_in_tables() {
    let served = Served::new(DISK, Some(""));
    served
        .place
        .io(URI, &["write -P 7 0 64k", "read -P 7 0 64k"]);
    let disks = served.ctl_says("list");
    assert_eq!(line(&disks, "d")[..4], ["d", "qcow2", "1", "MiB"]);
    assert!(line(&disks, "d").contains(&"e"), "{disks}");
    let disk = served.ctl_says("show d");
    for part in ["Layers", "Exports", "Requests", "writable"] {
        assert!(disk.contains(part), "{disk}");
    }
    assert_eq!(line(&disk, "write")[1..4], ["1", "64", "KiB"]);
    assert_eq!(line(&served.ctl_says("exports"), "e"), ["e", "nbd", "d"]);
    assert_eq!(line(&served.ctl_says("nodes"), "d")[..2], ["d", "qcow2"]);
    assert!(line(&served.ctl_says("stats"), "d").contains(&"KiB"));
    assert!(served.ctl_says("host").contains("1 disks"));
    let tcp = format!("list --connect 127.0.0.1:{}", served.port);
    assert_eq!(served.ctl_says(&tcp), disks);
    served.daemon.end();
}

#[test]
fn programs_get_what_the_daemon_has_said() {
    let served = Served::new(DISK, None);
    for (command, target) in [
        ("list", "/v1/disks"),
        ("show d", "/v1/disks/d"),
        ("exports", "/v1/exports"),
        ("nodes", "/v1/nodes"),
    ] {
        let said = served.ctl_says(&format!("{command} --output=json"));
        let said: Value = serde_json::from_str(&said).expect("JSON");
        assert_eq!(said, served.must("GET", target, Value::Null), "{command}");
    }
    let version: Value = serde_json::from_str(&served.ctl_says("qmp query-version")).expect("JSON");
    assert_eq!(version["qemu"]["major"], 10);
    served.daemon.end();
}

#[test]
fn disks_are_changed_and_jobs_led() {
    let mut served = Served::new(DISK, None);
    assert_eq!(
        served.ctl_says("snapshot d over.qcow2 --node-name over -f qcow2"),
        ""
    );
    served.place.io(URI, &["write -P 9 0 64k"]);
    served.ctl_says("flush over");
    // Clients of NBD are told a size once.
    assert!(
        served
            .ctl_fails("resize over 2M")
            .contains("Permission conflict")
    );
    let free = r#"{"driver":"qcow2","node-name":"free","file":{"driver":"file","filename":"o"}}"#;
    served.ctl_says(&format!("qmp blockdev-add {free}"));
    served.ctl_says("resize free 2M");
    assert_eq!(line(&served.ctl_says("list"), "free")[2..4], ["2", "MiB"]);
    let refused = served.ctl_fails("resize free 1M");
    assert!(refused.contains("--shrink"), "{refused}");
    assert_eq!(line(&served.ctl_says("list"), "free")[2..4], ["2", "MiB"]);
    served.ctl_says("mirror over mirror.qcow2 -f qcow2 --job-id m --speed 1k");
    assert_eq!(line(&served.ctl_says("jobs"), "m")[..2], ["m", "mirror"]);
    served.ctl_says("job pause m");
    assert!(
        served
            .ctl_fails("job complete m")
            .contains("cannot accept command verb")
    );
    served.ctl_says("job resume m");
    served.ctl_says("job speed m 0");
    served.daemon.wait("m", "ready");
    served.ctl_says("job complete m");
    served.daemon.wait("m", "null");
    assert!(served.ctl_fails("unexport nosuch").contains("nosuch"));
    served.ctl_says("unexport e --force");
    assert_eq!(served.ctl_says("qmp quit"), "{}\n");
    served.daemon.wait_for_exit();
    served
        .place
        .io("mirror.qcow2", &["read -P 9 0 64k", "read -P 1 64k 64k"]);
    served.place.io("over.qcow2", &["read -P 9 0 64k"]);
}

#[test]
fn what_goes_wrong_is_told_with_what_to_do() {
    let served = Served::new(DISK, None);
    assert!(
        served
            .ctl_fails("show nosuch")
            .contains("Disk 'nosuch' not found")
    );
    assert!(
        served
            .ctl_fails("list --connect unix:nosuch")
            .contains("No such file")
    );
    assert!(served.ctl_fails("frobnicate").contains("--help"));
    assert!(served.ctl_fails("resize d").contains("resize DISK SIZE"));
    assert!(
        served
            .ctl_fails("list --token-file nosuch")
            .contains("nosuch")
    );
    let output = Command::new(env!("CARGO_BIN_EXE_vellum"))
        .env_remove("VELLUM_CTL")
        .args(["ctl", "list"])
        .output()
        .expect("the program runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("--connect") && said.contains("VELLUM_CTL"),
        "{said}"
    );
    served.daemon.end();
}

#[test]
fn a_backup_is_waited_for_and_writes_over_nothing_unasked() {
    let served = Served::new(DISK, None);
    let path = |name: &str| served.place.path(name);
    served.ctl_says("backup d copy.qcow2 -f qcow2 --wait");
    assert!(
        !served.ctl_says("jobs").contains("backup-d"),
        "it was dismissed"
    );
    served.place.img("check -q copy.qcow2");
    let before = std::fs::read(path("copy.qcow2")).expect("it is there");
    for line in [
        "backup d copy.qcow2",
        "mirror d copy.qcow2",
        "snapshot d copy.qcow2",
    ] {
        let refused = served.ctl_fails(line);
        assert!(refused.contains("--overwrite"), "{line}: {refused}");
    }
    assert_eq!(
        std::fs::read(path("copy.qcow2")).expect("it is there"),
        before
    );
    served.ctl_says("backup d copy.qcow2 -f qcow2 --overwrite --wait");
    // What a job meets is told, and the job is gone.
    std::fs::write(path("junk"), [7; 1 << 20]).expect("a file");
    let reads = json!([{"event": "none", "iotype": "read", "errno": 5}]);
    let below = json!({"driver": "blkdebug", "image": {"driver": "file", "filename": "junk"},
        "inject-error": reads});
    let worn = json!({"driver": "raw", "node-name": "worn", "file": below});
    served.ctl_says(&format!("qmp blockdev-add {worn}"));
    let failed = served.ctl_fails("backup worn other.raw -f raw --wait --job-id broken");
    assert!(failed.contains("'broken' has failed: "), "{failed}");
    assert!(!served.ctl_says("jobs").contains("broken"));
    served.daemon.end();
}

#[test]
fn a_daemon_that_does_not_answer_is_given_up() {
    let served = Served::new(DISK, None);
    let child = served.daemon.running.child.id().to_string();
    served.place.must("kill", &["-STOP", &child]);
    let failed = served.ctl_fails("list --timeout 0.3");
    assert!(failed.contains("--timeout"), "{failed}");
    served.place.must("kill", &["-CONT", &child]);
    served.ctl_says("list --timeout 0");
    served.daemon.end();
}

#[test]
fn a_token_comes_from_a_file() {
    let place = crate::place::Place::new();
    place.write("token", "0123456789abcdef\n");
    let daemon = place.ours("--object secret,id=t,file=token --metrics unix:ctl,token-secret=t");
    let served = Served {
        place,
        daemon,
        port: 0,
    };
    assert!(served.ctl_fails("list").contains("--token-file"));
    served.ctl_says("list --token-file token");
    served.daemon.end();
}

#[test]
fn names_are_completed_by_asking_the_daemon() {
    let served = Served::new(DISK, None);
    let complete = |words: &[&str]| {
        let at = (words.len() - 1).to_string();
        let mut all = vec!["__complete", "vellum", at.as_str()];
        all.extend(words);
        let output = Command::new(env!("CARGO_BIN_EXE_vellum"))
            .current_dir(served.place.root())
            .args(&all)
            .output()
            .expect("the program runs");
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{output:?}"
        );
        String::from_utf8(output.stdout).expect("text")
    };
    let connect = "--connect=unix:ctl";
    assert_eq!(complete(&["ctl", connect, "show", ""]), "d\tqcow2\n:end\n");
    assert_eq!(complete(&["ctl", connect, "unexport", ""]), "e\td\n:end\n");
    assert!(complete(&["ctl", connect, "qmp", "query-v"]).starts_with("query-version\t"));
    assert!(complete(&["ctl", "sh"]).starts_with("show\t"));
    assert!(complete(&["ctl", "job", "pau"]).starts_with("pause"));
    assert_eq!(
        complete(&["ctl", "--connect=unix:nosuch", "show", ""]),
        ":end\n"
    );
    served.daemon.end();
}

#[test]
fn top_prints_once_where_nobody_sits() {
    let served = Served::new(DISK, None);
    let begin = Instant::now();
    let said = served.ctl_says("top -i 0.2");
    assert!(begin.elapsed() < PATIENCE);
    assert_eq!(said.lines().count(), 2, "{said}");
    assert!(!said.contains('\x1b'));
    assert_eq!(line(&said, "d")[0], "d");
    let begin = Instant::now();
    let said = served.ctl_says("top -i 0.1 -n 3 --output=json");
    assert!(begin.elapsed() > Duration::from_millis(300));
    let lines: Vec<Value> = said
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(lines.len(), 3);
    assert_eq!(lines[0][0]["node-name"], json!("d"));
    served.daemon.end();
}

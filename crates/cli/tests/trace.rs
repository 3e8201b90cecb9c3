//! `--trace`: options beside QEMU's, and the events that are written.

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

const PROGRAMS: [&str; 4] = ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"];

/// A folder with an image, and links to our program.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().expect("a folder");
        let ours = folder.path().join("ours");
        std::fs::create_dir(&ours).expect("a folder");
        for program in PROGRAMS {
            symlink(env!("CARGO_BIN_EXE_vellum"), ours.join(program)).expect("a link");
        }
        let place = Place { folder };
        place.write("events", "# these\n  bdrv_open*  \n\n-nonsense\n-bar*\n");
        place.write("list", "help\n");
        let made = place.run("ours/qemu-img", "create -q -f qcow2 disk 1M");
        assert!(made.status.success(), "{made:?}");
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("a file");
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).expect("a file")
    }

    fn run(&self, program: &str, line: &str) -> Output {
        let program = match program.contains('/') {
            true => self.path(program),
            false => PathBuf::from(program),
        };
        let mut command = Command::new(program);
        command.current_dir(self.folder.path());
        command.args(line.split_whitespace()).stdin(Stdio::null());
        command
            .output()
            .expect("the program of `cargo xtask setup`")
    }
}

/// The names of events in lines of a trace, each of which must be of some process.
fn names(trace: &str) -> Vec<String> {
    let name = |line: &str| {
        let (process, rest) = line.split_once('@').expect(line);
        assert!(process.parse::<u32>().is_ok(), "{line}");
        let (time, event) = rest.split_once(':').expect(line);
        let (seconds, micros) = time.split_once('.').expect(line);
        assert!(
            seconds.parse::<u64>().is_ok() && micros.len() == 6,
            "{line}"
        );
        event.split(' ').next().expect("a name").to_owned()
    };
    trace.lines().map(name).collect()
}

/// The names behind `trace!(name: ` in the sources below a folder.
fn collect(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(&path, names);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            let text = std::fs::read_to_string(&path).expect("a source");
            for call in text.split("trace!(").skip(1) {
                let name = call.trim_start().strip_prefix("name: \"");
                let name = name.and_then(|rest| rest.split('"').next());
                let name = name.unwrap_or_else(|| panic!("an event without a name in {path:?}"));
                names.insert(name.to_owned());
            }
        }
    }
}

#[test]
fn the_list_has_every_event_that_is_emitted() {
    let place = Place::new();
    let listed = place.run("ours/qemu-storage-daemon", "--trace help");
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let listed: BTreeSet<String> = listed.lines().map(str::to_owned).collect();
    let mut emitted = BTreeSet::new();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for part in std::fs::read_dir(crates).expect("the crates") {
        let sources = part.expect("a crate").path().join("src");
        if sources.is_dir() {
            collect(&sources, &mut emitted);
        }
    }
    assert_eq!(listed, emitted);
}

#[test]
fn options_are_taken_and_refused_as_by_qemu() {
    let place = Place::new();
    for option in [
        "nonsense",
        "-nonsense",
        "nonsense*",
        "enable=nonsense,enable=other",
        "events=events",
        "events=none",
        "events=.",
        "foo=bar",
        "nonsense,foo=bar",
        "file=none/log",
        "nonsense,file=log",
    ] {
        for (program, rest) in [
            ("qemu-img", "info -f raw events"),
            ("qemu-io", "-r -f raw -c quit events"),
            ("qemu-storage-daemon", "--blockdev bad"),
        ] {
            let real = place.run(program, &format!("--trace {option} {rest}"));
            let off = match option == "events=events" {
                // What it turns on is there, and written.
                true => "-T -*",
                false => "",
            };
            let line = format!("--trace {option} {off} {rest}");
            let own = place.run(&format!("ours/{program}"), &line);
            let text = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(text(&own), text(&real), "{program} {line}");
            assert_eq!(own.status.code(), real.status.code(), "{program} {line}");
        }
    }
}

#[test]
fn every_program_lists_its_events() {
    let place = Place::new();
    for program in PROGRAMS {
        for option in ["help", "?", "enable=help", "events=list"] {
            let listed = place.run(&format!("ours/{program}"), &format!("-T {option}"));
            assert_eq!(listed.status.code(), Some(0), "{program} -T {option}");
            let text = String::from_utf8_lossy(&listed.stdout).into_owned();
            assert!(
                text.contains("\nqmp_event\n"),
                "{program} -T {option}: {text}"
            );
        }
    }
}

#[test]
fn what_is_asked_for_is_written_and_nothing_else() {
    let place = Place::new();
    let done = place.run(
        "ours/qemu-io",
        "-T qcow2_* -T -qcow2_c*,file=log -c flush disk",
    );
    assert!(done.status.success(), "{done:?}");
    assert_eq!(
        names(&place.read("log")),
        ["qcow2_flush_start", "qcow2_flush_done"]
    );

    let done = place.run("ours/qemu-img", "-T bdrv_open_common info disk");
    let told = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(
        names(&told).iter().all(|name| name == "bdrv_open_common"),
        "{told}"
    );
    assert!(
        told.contains("filename \"disk\" format_name \"file\""),
        "{told}"
    );

    let silent = place.run("ours/qemu-img", "-T job* info disk");
    assert_eq!(String::from_utf8_lossy(&silent.stderr), "");
}

#[test]
fn a_daemon_tells_of_nodes_clients_and_jobs_and_of_no_secrets() {
    let place = Place::new();
    let commands = [
        r#"{"execute": "qmp_capabilities"}"#,
        r#"{"execute": "object-add", "arguments": {"qom-type": "secret", "id": "s", "data": "hush"}}"#,
        r#"{"execute": "job-cancel", "arguments": {"id": "none"}}"#,
        r#"{"execute": "quit"}"#,
    ];
    let mut daemon = Command::new(place.path("ours/qemu-storage-daemon"));
    daemon.current_dir(place.folder.path()).args([
        "--trace=*,file=log",
        "--blockdev=qcow2,node-name=disk,file.driver=file,file.filename=disk",
        "--nbd-server=addr.type=unix,addr.path=sock",
        "--export=nbd,id=e,node-name=disk,writable=on",
        "--chardev=stdio,id=m",
        "--monitor=m",
    ]);
    daemon.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut daemon = daemon.spawn().expect("the program runs");
    let mut input = daemon.stdin.take().expect("a pipe");
    let mut output = std::io::BufReader::new(daemon.stdout.take().expect("a pipe"));
    let mut line = String::new();
    // The greeting: everything is there.
    std::io::BufRead::read_line(&mut output, &mut line).expect("a line");
    let mut write = Command::new(place.path("ours/qemu-io"));
    write.current_dir(place.folder.path());
    write.args([
        "-f",
        "raw",
        "-c",
        "write 0 4k",
        "nbd+unix:///disk?socket=sock",
    ]);
    assert!(write.output().expect("the program runs").status.success());
    for command in commands {
        std::io::Write::write_all(&mut input, format!("{command}\n").as_bytes()).expect("sent");
    }
    assert!(daemon.wait().expect("an end").success());
    let log = place.read("log");
    let all = names(&log);
    for name in [
        "bdrv_open_common",
        "block_export_added",
        "nbd_client_connected",
        "nbd_negotiate_success",
        "nbd_receive_request",
        "export_request_start",
        "qcow2_writev_start_req",
        "export_request_done",
        "nbd_request_done",
        "qcow2_commit_done",
        "nbd_client_disconnected",
        "handle_qmp_command",
        "monitor_qmp_respond",
        "block_export_removed",
        "node_closed",
    ] {
        assert!(
            all.iter().any(|other| other == name),
            "{name} is not in {log}"
        );
    }
    assert!(log.contains("error \"Job not found\""), "{log}");
    assert!(!log.contains("hush"), "{log}");
}

#[test]
fn no_name_steers_a_terminal_or_begins_a_line() {
    let place = Place::new();
    let name = "./a\n1@2.000003:b\u{1b}[2J";
    place.write(name, "");
    let mut info = Command::new(place.path("ours/qemu-img"));
    info.current_dir(place.folder.path());
    info.args(["-T", "*", "info", "-f", "raw", name]);
    let info = info.output().expect("the program runs");
    let told = String::from_utf8_lossy(&info.stderr).into_owned();
    assert!(
        names(&told).contains(&"bdrv_open_common".to_owned()),
        "{told}"
    );
    assert!(!names(&told).contains(&"b".to_owned()), "{told}");
    assert!(!told.contains('\u{1b}'), "{told}");
}

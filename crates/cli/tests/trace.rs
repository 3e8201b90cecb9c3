//! `--trace`: options beside QEMU's, and the events that are written.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;

use serde_json::json;
use vellum_testing::{Folder, Qmp, Running};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

const PROGRAMS: [&str; 4] = ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"];

/// A folder with an image.
fn folder() -> Folder {
    let folder = Folder::new(VELLUM);
    folder.write("events", "# these\n  bdrv_open*  \n\n-nonsense\n-bar*\n");
    folder.write("list", "help\n");
    folder.must("our qemu-img", "create -q -f qcow2 disk 1M");
    folder
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
    let folder = folder();
    let listed = folder.run("our qemu-storage-daemon", "--trace help").out;
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
    let folder = folder();
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
            let real = folder.run(program, &format!("--trace {option} {rest}"));
            let off = match option == "events=events" {
                // What it turns on is there, and written.
                true => "-T -*",
                false => "",
            };
            let line = format!("--trace {option} {off} {rest}");
            let own = folder.run(&format!("our {program}"), &line);
            assert_eq!(own.err, real.err, "{program} {line}");
            assert_eq!(own.code, real.code, "{program} {line}");
        }
    }
}

#[test]
fn every_program_lists_its_events() {
    let folder = folder();
    for program in PROGRAMS {
        for option in ["help", "?", "enable=help", "events=list"] {
            let listed = folder.run(&format!("our {program}"), &format!("-T {option}"));
            let text = listed.expect(0).out;
            assert!(
                text.contains("\nqmp_event\n"),
                "{program} -T {option}: {text}"
            );
        }
    }
}

#[test]
fn what_is_asked_for_is_written_and_nothing_else() {
    let folder = folder();
    folder.must(
        "our qemu-io",
        "-T qcow2_* -T -qcow2_c*,file=log -c flush disk",
    );
    assert_eq!(
        names(&folder.text("log")),
        ["qcow2_flush_start", "qcow2_flush_done"]
    );

    let done = folder.run("our qemu-img", "-T bdrv_open_common info disk");
    let told = done.err;
    assert!(
        names(&told).iter().all(|name| name == "bdrv_open_common"),
        "{told}"
    );
    assert!(
        told.contains("filename \"disk\" format_name \"file\""),
        "{told}"
    );

    let silent = folder.run("our qemu-img", "-T job* info disk");
    assert_eq!(silent.err, "");
}

#[test]
fn a_daemon_tells_of_nodes_clients_and_jobs_and_of_no_secrets() {
    let folder = folder();
    let mut daemon = folder.command(
        "our qemu-storage-daemon",
        "--trace=*,file=log \
         --blockdev=qcow2,node-name=disk,file.driver=file,file.filename=disk \
         --nbd-server=addr.type=unix,addr.path=sock \
         --export=nbd,id=e,node-name=disk,writable=on --chardev=stdio,id=m --monitor=m",
    );
    daemon.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut daemon = Running::start(&mut daemon);
    let mut monitor = Qmp::of_child(&mut daemon.child);
    // It greets once everything is there.
    monitor.try_greet().expect("a greeting");
    let export = "-f raw nbd+unix:///disk?socket=sock";
    folder.io_by("our qemu-io", export, &["write 0 4k"]);
    let secret = json!({"qom-type": "secret", "id": "s", "data": "hush"});
    monitor.must("object-add", secret);
    monitor.refused("job-cancel", json!({"id": "none"}));
    monitor.must("quit", json!({}));
    daemon.wait_for_success();
    let log = folder.text("log");
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
    let folder = folder();
    let name = "./a\n1@2.000003:b\u{1b}[2J";
    folder.write(name, "");
    let words = ["-T", "*", "info", "-f", "raw", name];
    let told = folder.run("our qemu-img", &words).err;
    assert!(
        names(&told).contains(&"bdrv_open_common".to_owned()),
        "{told}"
    );
    assert!(!names(&told).contains(&"b".to_owned()), "{told}");
    assert!(!told.contains('\u{1b}'), "{told}");
}

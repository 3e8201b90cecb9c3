//! Programs that are known to use the daemon: what they send, as they send it.

use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};
use vellum_testing::{Qmp, until};

use crate::place::{NAME, Place};

/// KubeVirt's changed-block tracking makes an overlay whose data lie in a raw file: all messages
/// at once, without a look at the answers.
#[test]
fn kubevirts_overlays_are_made_alike() {
    let play = |real: bool| {
        let place = Place::new();
        place.write("overlay", "");
        place.img("create -q -f raw disk.img 64M");
        let program = match real {
            true => PathBuf::from(NAME),
            false => place.path(NAME),
        };
        let mut daemon = place.start(
            &program,
            "--blockdev file,node-name=file,filename=overlay \
             --blockdev file,node-name=data-file,filename=disk.img",
        );
        let options = json!({
            "driver": "qcow2",
            "file": "file",
            "data-file": "data-file",
            "data-file-raw": true,
            "size": 67_108_864,
        });
        let messages = [
            json!({"execute": "blockdev-create", "arguments": {"job-id": "create", "options": options}}),
            json!({"execute": "job-dismiss", "arguments": {"id": "create"}}),
            json!({"execute": "quit"}),
        ];
        let mut answers = Vec::new();
        if real {
            // It may stand still where it is told to quit while the job runs.
            for message in &messages {
                daemon.say(&format!("{message}\n"));
                answers.push(daemon.answer());
                if message["execute"] == "blockdev-create" {
                    daemon.wait("create", "concluded");
                }
            }
        } else {
            let text: String = messages.iter().map(|one| format!("{one}\n")).collect();
            daemon.say(&text);
            answers.extend(messages.iter().map(|_| daemon.answer()));
        }
        daemon.wait_for_exit();
        let info = place.img("info -U --output=json overlay");
        let info: Value = serde_json::from_str(&info).expect("JSON");
        let data = info["format-specific"]["data"].clone();
        (answers, data)
    };
    let (ours, theirs) = (play(false), play(true));
    let done = json!({"return": {}});
    assert_eq!((&ours.0[0], &ours.0[2]), (&done, &done));
    assert_eq!((&theirs.0[0], &theirs.0[2]), (&done, &done));
    // Whether it is concluded by then is a matter of luck.
    let early = json!({"error": {"class": "GenericError", "desc":
        "Job 'create' in state 'running' cannot accept command verb 'dismiss'"}});
    assert!([&done, &early].contains(&&ours.0[1]), "{}", ours.0[1]);
    assert_eq!(ours.1, theirs.1);
}

/// What it says of a disk that is a file in `folder`.
fn proxmox_commands(folder: &str, aio: &str) -> [(&'static str, Value); 3] {
    let cache = json!({"direct": true, "no-flush": false});
    [
        (
            "object-add",
            json!({
                "id": "throttle-drive-scsi0",
                "limits": {
                    "bps-total": 104_857_600,
                    "bps-total-max": 209_715_200,
                    "bps-total-max-length": 60,
                    "iops-write": 500,
                },
                "qom-type": "throttle-group",
            }),
        ),
        (
            "blockdev-add",
            json!({
                "driver": "throttle",
                "node-name": "drive-scsi0",
                "throttle-group": "throttle-drive-scsi0",
                "file": {
                    "node-name": "f5c3c3c3c3c3c3c3c3c3c3c3c3c3c3c",
                    "driver": "qcow2",
                    "cache": cache,
                    "read-only": false,
                    "discard": "ignore",
                    "detect-zeroes": "on",
                    "file": {
                        "driver": "file",
                        "filename": format!("{folder}/b"),
                        "cache": cache,
                        "aio": aio,
                        "discard": "ignore",
                        "detect-zeroes": "on",
                        "node-name": "e5c3c3c3c3c3c3c3c3c3c3c3c3c3c3c",
                        "read-only": false,
                    },
                },
            }),
        ),
        (
            "block-export-add",
            json!({
                "type": "fuse",
                "id": "export",
                "mountpoint": format!("{folder}/mounted"),
                "node-name": "drive-scsi0",
                "writable": true,
                "growable": false,
                "allow-other": "off",
            }),
        ),
    ]
}

/// What Proxmox's library tells a daemon, with the answers, and what the export shows.
fn serve_as_proxmox(real: bool, aio: &str) -> Vec<Value> {
    let place = Place::new();
    place.write("mounted", "");
    let program = match real {
        true => PathBuf::from(NAME),
        false => place.path(NAME),
    };
    // In the background the real one stands in another folder.
    let folder = place.root().display();
    let status = Command::new(program)
        .current_dir(place.root())
        .args(["--daemonize", "--pidfile", &format!("{folder}/pid")])
        .args([
            "--chardev",
            &format!("socket,id=qmp,path={folder}/qmp,server=on,wait=off"),
        ])
        .args(["--monitor", "chardev=qmp,mode=control"])
        .status()
        .expect("the program runs");
    assert!(status.success());
    let pid = place.text("pid");
    let mut client = Qmp::connect(place.path("qmp"));
    let mut answers = Vec::new();
    for (command, arguments) in proxmox_commands(&folder.to_string(), aio) {
        answers.push(client.ask(command, arguments));
    }
    let bytes = place.read("mounted");
    assert_eq!(bytes.len(), 1 << 20);
    assert!(bytes[128 << 10..384 << 10].iter().all(|&byte| byte == 3));
    let disk = std::fs::File::options()
        .write(true)
        .open(place.path("mounted"));
    let disk = disk.expect("a disk");
    std::os::unix::fs::FileExt::write_all_at(&disk, &[7; 4096], 0).expect("room");
    disk.sync_all().expect("a disk");
    drop(disk);
    answers.push(client.ask("block-export-del", json!({"id": "export"})));
    answers.push(client.ask("quit", json!({})));
    until("the end", || !is_running(pid.trim()));
    for left in ["pid", "qmp"] {
        assert!(!place.path(left).exists(), "{left} stays, real: {real}");
    }
    place.io("b", &["read -P 7 0 4k", "read -P 3 128k 256k"]);
    answers
}

/// Proxmox serves an image as a file, throttled, by a daemon in the background.
#[test]
fn proxmoxs_exports_come_and_go_alike() {
    for aio in ["io_uring", "threads", "native"] {
        let answers = serve_as_proxmox(false, aio);
        assert!(
            answers.iter().all(|one| *one == json!({"return": {}})),
            "{answers:?}"
        );
        assert_eq!(answers, serve_as_proxmox(true, aio), "{aio}");
    }
}

fn is_running(pid: &str) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    status.is_ok_and(|status| !status.contains(") Z "))
}

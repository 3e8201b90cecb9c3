//! Programs that are known to use the daemon: what they send, as they send it.

use std::io::{BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;

use serde_json::{Value, json};

use crate::place::Step::{Ask, Wait};
use crate::place::{NAME, PATIENCE, Place, same};

/// KubeVirt's changed-block tracking makes an overlay whose data lie in a raw file.
#[test]
fn kubevirts_images_are_created_alike() {
    let file = |node: &str, name: &str| {
        Ask(
            "blockdev-add",
            json!({"driver": "file", "node-name": node, "filename": name}),
        )
    };
    let create = json!({
        "job-id": "create",
        "options": {
            "driver": "qcow2",
            "file": "overlay",
            "data-file": "data",
            "data-file-raw": true,
            "size": 1048576,
        },
    });
    let create_file = json!({
        "job-id": "file",
        "options": {"driver": "file", "filename": "cbt", "size": 0},
    });
    same(
        &[],
        &[
            Ask("blockdev-create", create_file),
            Wait("file", "concluded"),
            Ask("job-dismiss", json!({"id": "file"})),
            file("overlay", "cbt"),
            file("data", "b"),
            Ask("blockdev-create", create),
            Wait("create", "concluded"),
            Ask("query-jobs", json!({})),
            Ask("job-dismiss", json!({"id": "create"})),
            Ask("query-jobs", json!({})),
        ],
    );
}

/// A monitor's client of a daemon in the background.
struct Client {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Client {
    fn connect(place: &Place, path: &str) -> Client {
        let writer = UnixStream::connect(place.path(path)).expect("it listens");
        writer.set_read_timeout(Some(PATIENCE)).expect("set");
        let reader = BufReader::new(writer.try_clone().expect("a clone"));
        let mut client = Client { reader, writer };
        assert!(client.next().get("QMP").is_some());
        client.ask("qmp_capabilities", json!({}));
        client
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        std::io::BufRead::read_line(&mut self.reader, &mut line).expect("a line");
        serde_json::from_str(&line).expect("JSON")
    }

    /// The answer; events before it are left out.
    fn ask(&mut self, command: &str, arguments: Value) -> Value {
        let request = json!({"execute": command, "arguments": arguments});
        let sent = self.writer.write_all(format!("{request}\r\n").as_bytes());
        sent.expect("it listens");
        loop {
            let message = self.next();
            if message.get("event").is_none() {
                return message;
            }
        }
    }
}

/// Proxmox serves an image as a file, throttled, by a daemon in the background.
#[test]
fn proxmoxs_exports_come_and_go() {
    let place = Place::new();
    std::fs::write(place.path("mounted"), "").expect("a file");
    let status = Command::new(place.path(NAME))
        .current_dir(place.folder.path())
        .args(["--daemonize", "--pidfile", "pid"])
        .args(["--chardev", "socket,id=qmp,path=qmp,server=on,wait=off"])
        .args(["--monitor", "chardev=qmp,mode=control"])
        .status()
        .expect("the program runs");
    assert!(status.success());
    let pid = std::fs::read_to_string(place.path("pid")).expect("a process id");
    let mut client = Client::connect(&place, "qmp");
    let done = json!({"return": {}});
    let folder = place.folder.path().display();
    for (command, arguments) in [
        (
            "object-add",
            json!({
                "qom-type": "throttle-group",
                "id": "limits",
                "limits": {"bps-total": 104857600, "iops-total": 1000},
            }),
        ),
        (
            "blockdev-add",
            json!({
                "driver": "throttle",
                "node-name": "disk",
                "throttle-group": "limits",
                "file": {
                    "driver": "qcow2",
                    "file": {"driver": "file", "filename": format!("{folder}/b")},
                },
            }),
        ),
        (
            "block-export-add",
            json!({
                "type": "fuse",
                "id": "export",
                "node-name": "disk",
                "mountpoint": format!("{folder}/mounted"),
                "writable": true,
            }),
        ),
    ] {
        assert_eq!(client.ask(command, arguments), done, "{command}");
    }
    let bytes = std::fs::read(place.path("mounted")).expect("a disk");
    assert_eq!(bytes.len(), 1 << 20);
    assert!(bytes[128 << 10..384 << 10].iter().all(|&byte| byte == 3));
    let export = json!({"id": "export"});
    assert_eq!(client.ask("block-export-del", export), done);
    assert_eq!(client.ask("quit", json!({})), done);
    let gone = std::time::Instant::now() + PATIENCE;
    let process = format!("/proc/{}", pid.trim());
    let is_running = || {
        let status = std::fs::read_to_string(format!("{process}/stat"));
        status.is_ok_and(|status| !status.contains(") Z "))
    };
    while is_running() {
        assert!(std::time::Instant::now() < gone, "it does not end");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(!place.path("pid").exists() && !place.path("qmp").exists());
}

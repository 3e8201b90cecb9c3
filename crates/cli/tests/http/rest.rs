//! Disks looked at and changed over HTTP, while their users go on.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Answer, DISK, Served, URI, ask, tcp, unix};
use crate::place::PATIENCE;

/// Waits until a job is in a state; `None`: until it is gone.
fn wait(served: &Served, id: &str, status: Option<&str>) {
    let begin = Instant::now();
    loop {
        let jobs = served.must("GET", "/v1/jobs", Value::Null);
        let jobs = jobs.as_array().expect("jobs");
        let job = jobs.iter().find(|job| job["id"] == id);
        if job.map(|job| job["status"].as_str().expect("a state")) == status {
            return;
        }
        assert!(begin.elapsed() < PATIENCE, "{jobs:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_disk_is_told_with_its_layers_exports_and_what_was_asked_of_it() {
    let served = Served::new(DISK, None);
    served
        .place
        .io(URI, &["write -P 7 0 64k", "read -P 7 0 64k", "flush"]);
    let disks = served.must("GET", "/v1/disks", Value::Null);
    let disk = &disks[0];
    assert_eq!(disks.as_array().expect("disks").len(), 1, "{disks}");
    assert_eq!(
        (&disk["node-name"], &disk["size-bytes"]),
        (&json!("d"), &json!(1 << 20))
    );
    assert_eq!(
        disk["exports"],
        json!([{"id": "e", "type": "nbd", "name": "x"}])
    );
    let layers = disk["layers"].as_array().expect("layers");
    let files: Vec<&Value> = layers.iter().map(|layer| &layer["filename"]).collect();
    assert_eq!(files, ["t", "m", "b"]);
    for layer in layers {
        let allocated = layer["allocated-bytes"].as_u64().expect("a number");
        assert!(
            allocated > 0 && layer["file-bytes"].as_u64() > Some(0),
            "{layer}"
        );
    }
    let stats = &disk["stats"];
    assert_eq!(stats["write"]["bytes"], 65536, "{stats}");
    assert!(stats["read"]["bytes"].as_u64() >= Some(65536), "{stats}");
    assert!(stats["flush"]["requests"].as_u64() >= Some(1), "{stats}");
    assert_eq!(stats["in-flight"], 0);
    assert!(stats["cache"]["hits"].as_u64() > Some(0), "{stats}");
    let sample = served.must("GET", "/v1/stats", Value::Null);
    assert_eq!(sample["disks"][0]["write-bytes"], 65536, "{sample}");
    let host = served.must("GET", "/v1/host", Value::Null);
    assert_eq!(host["pid"], served.daemon.running.child.id());
    let name = served.place.must("uname", "-n");
    assert_eq!(host["host-name"], name.trim_end());
    let systems = host["file-systems"].as_array().expect("file systems");
    assert!(
        systems[0]["size-bytes"].as_u64() > systems[0]["free-bytes"].as_u64(),
        "{host}"
    );
    served.daemon.end();
}

fn disk_names(served: &Served) -> Vec<String> {
    let disks = served.must("GET", "/v1/disks", Value::Null);
    let names = disks.as_array().expect("a list").iter();
    let name = |disk: &Value| disk["node-name"].as_str().expect("a name").to_owned();
    names.map(name).collect()
}

#[test]
fn what_http_changes_a_monitor_sees_and_the_other_way_round() {
    let mut served = Served::new(DISK, None);
    served.must(
        "POST",
        "/v1/disks/d/snapshot",
        json!({"snapshot-file": "over", "format": "qcow2",
        "snapshot-node-name": "over"}),
    );
    let exports = served.daemon.must("query-block-exports", json!({}));
    assert_eq!(exports[0]["node-name"], "over");
    assert_eq!(served.must("GET", "/v1/exports", Value::Null), exports);
    served.place.io(URI, &["write -P 9 0 64k"]);
    let size = json!({"size": 2 << 20});
    // Clients of NBD are told a size once.
    assert_eq!(
        served
            .ask("POST", "/v1/disks/over/resize", size.clone())
            .status,
        409
    );
    let free = json!({"driver": "qcow2", "node-name": "free",
        "file": {"driver": "file", "filename": "o"}});
    served.must("POST", "/v1/nodes", free);
    served.must("POST", "/v1/disks/free/resize", size);
    assert_eq!(
        served.must("GET", "/v1/disks/free", Value::Null)["size-bytes"],
        2 << 20
    );
    let nodes = served
        .daemon
        .must("query-named-block-nodes", json!({"flat": true}));
    assert_eq!(served.must("GET", "/v1/nodes", Value::Null), nodes);
    let target = json!({"target": "copy", "format": "qcow2"});
    served.must("POST", "/v1/disks/over/backup", target);
    wait(&served, "backup-over", None);
    served.must(
        "POST",
        "/v1/disks/over/mirror",
        json!({"target": "mirror", "format": "qcow2",
        "job-id": "m"}),
    );
    served.daemon.wait("m", "ready");
    wait(&served, "m", Some("ready"));
    // What is only written to by a job is no disk.
    assert_eq!(disk_names(&served), ["free", "over"]);
    assert_eq!(
        served.must("GET", "/v1/disks/over", Value::Null)["jobs"],
        json!(["m"])
    );
    served.must("POST", "/v1/jobs/m/speed", json!({"speed": 1}));
    let busy = served.ask("DELETE", "/v1/nodes/over", Value::Null);
    assert_eq!(busy.status, 409, "{}", busy.text());
    served.must("POST", "/v1/jobs/m/complete", Value::Null);
    wait(&served, "m", None);
    served.must("DELETE", "/v1/exports/e?mode=hard", Value::Null);
    assert_eq!(
        served.ask("DELETE", "/v1/exports/e", Value::Null).status,
        404
    );
    assert_eq!(served.must("POST", "/v1/qmp/quit", Value::Null), json!({}));
    served.daemon.wait_for_exit();
    assert!(!served.place.has("ctl"), "the socket is gone");
    for copy in ["copy", "mirror"] {
        served.place.io(
            copy,
            &["read -P 9 0 64k", "read -P 1 64k 64k", "read -P 2 128k 64k"],
        );
    }
}

#[test]
fn nobody_but_the_owner_can_connect_and_a_dead_ones_socket_is_replaced() {
    use std::os::unix::fs::PermissionsExt;
    let served = Served::new(&[], None);
    let socket = served.place.path("ctl");
    let mode = std::fs::metadata(&socket)
        .expect("a socket")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let Served { place, daemon, .. } = served;
    daemon.kill();
    assert!(socket.exists());
    let daemon = place.ours("--metrics unix:ctl");
    assert_eq!(
        ask(&mut unix(&socket), ("GET", "/v1/disks"), &[], b"").status,
        200
    );
    daemon.end();
    assert!(!socket.exists());
}

#[test]
fn over_tcp_without_a_token_nothing_changes_and_only_this_machine_is_meant() {
    let served = Served::new(DISK, Some(""));
    let over_tcp = |method: &str, target: &str, host: &str| -> Answer {
        ask(
            &mut tcp(served.port),
            (method, target),
            &[("Host", host)],
            b"",
        )
    };
    assert_eq!(
        over_tcp("GET", "/v1/disks", "localhost:1").json()[0]["node-name"],
        "d"
    );
    for host in ["evil.example", "localhost.evil.example", "10.0.0.1", ""] {
        assert_eq!(over_tcp("GET", "/v1/disks", host).status, 403, "{host}");
    }
    for (method, target) in [
        ("POST", "/v1/qmp/quit"),
        ("DELETE", "/v1/exports/e"),
        ("POST", "/v1/disks/d/flush"),
        ("PUT", "/"),
    ] {
        let refused = over_tcp(method, target, "127.0.0.1");
        assert_eq!(refused.status, 403, "{method} {target}");
        assert_eq!(
            refused.header("content-type"),
            Some("application/problem+json")
        );
        assert_eq!(refused.header("access-control-allow-origin"), None);
    }
    served.check_served();
    served.daemon.end();
}

#[test]
fn with_a_token_nothing_is_told_or_done_without_it() {
    let place = crate::place::Place::new();
    let token = "0123456789abcdef0123456789abcdef";
    place.write("token", format!("{token}\n"));
    let daemon = place.ours("--object secret,id=t,file=token --metrics unix:ctl,token-secret=t");
    let asked = |target: &str, carried: Option<&str>| {
        let value = carried.map(|token| format!("Bearer {token}"));
        let headers: Vec<(&str, &str)> = value
            .iter()
            .map(|value| ("Authorization", value.as_str()))
            .collect();
        ask(
            &mut unix(&place.path("ctl")),
            ("GET", target),
            &headers,
            b"",
        )
    };
    for carried in [
        None,
        Some(""),
        Some("wrong"),
        Some(&token[..31]),
        Some(&format!("{token}x")),
    ] {
        for target in ["/v1/disks", "/metrics", "/openapi.json", "/nosuch"] {
            let refused = asked(target, carried);
            assert_eq!(refused.status, 401, "{target} {carried:?}");
            assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
        }
    }
    assert_eq!(asked("/v1/disks", Some(token)).json(), json!([]));
    assert_eq!(asked("/", None).status, 200);
    daemon.end();
}

#[test]
fn what_others_could_reach_is_refused() {
    let place = crate::place::Place::new();
    for (words, part) in [
        ("0.0.0.0:0", "tls-creds=ID"),
        ("0.0.0.0:0,token-secret=t", "tls-creds=ID"),
        ("localhost:0,token-secret=nosuch", "nosuch"),
        ("localhost:0,token-secret=short", "16 letters"),
        ("/run/x", "unix:PATH"),
    ] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_vellum"))
            .current_dir(place.root())
            .args(["daemon", "--object", "secret,id=t,data=0123456789abcdef"])
            .args(["--object", "secret,id=short,data=0123", "--metrics", words])
            .output()
            .expect("the program runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{words}: {said}");
        assert!(said.contains(part), "{words}: {said}");
    }
}

//! `x-vellum-scrub`: images in use are compared with their checksums.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use super::place::{Daemon, Place, with};

const URI: &str = "nbd+unix:///?socket=sock";
const CLUSTER: u64 = 65536;

/// The images `b` and `t` of the place are `base` and `top` of a daemon; `t` stands on `b` and has
/// checksums, and its first cluster holds what that of `b` does, but for the first sector.
fn summed() -> Place {
    let place = Place::new();
    place.io("b", &["write -P 3 0 1M"]);
    place.img("create -q -f qcow2 -b b -F qcow2 t");
    vellum(
        &place,
        &["io", "-c", "write -P 9 0 512", "--image-opts", TOP],
    );
    place
}

const TOP: &str = "driver=qcow2,file.filename=t,checksums=on";

fn vellum(place: &Place, words: &[&str]) -> (i32, String) {
    let mut command = Command::new(PathBuf::from(env!("CARGO_BIN_EXE_vellum")));
    let output = command.args(words).current_dir(place.root());
    let output = output.output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.code().unwrap_or(-1), text)
}

fn start(place: &Place) -> Daemon {
    place.ours(
        "--nbd-server addr.type=unix,addr.path=sock \
             --blockdev driver=qcow2,node-name=base,read-only=on,file.driver=file,file.filename=b \
             \
             --blockdev driver=qcow2,node-name=top,backing=base,file.driver=file,file.filename=t \
             --export nbd,id=e,node-name=top,name=,writable=on",
    )
}

/// Changes a byte of the first cluster of `t`.
fn damage(place: &Place, inside: u64) {
    let map: Value = serde_json::from_str(&place.img("map -U --output=json t")).expect("JSON");
    let offset = map[0]["offset"].as_u64().expect("it is data");
    let file = OpenOptions::new().write(true).open(place.path("t"));
    let file = file.expect("the image");
    let before = file.metadata().expect("metadata").modified();
    let written = file.write_all_at(b"X", offset + inside);
    written.expect("it is written");
    // A disk does not tell.
    let told = file.set_modified(before.expect("a time"));
    told.expect("the time is set");
}

fn scrub(members: Value) -> Value {
    with(json!({"job-id": "s", "device": "top"}), members)
}

fn named(events: &[Value], name: &str) -> Vec<Value> {
    let events = events.iter().filter(|event| event["event"] == name);
    events.map(|event| event["data"].clone()).collect()
}

#[test]
fn damage_that_is_left_ends_a_scrub_with_an_error() {
    let place = summed();
    damage(&place, 100);
    damage(&place, 2 * 4096);
    let mut daemon = start(&place);
    daemon.must("x-vellum-scrub", scrub(json!({"auto-dismiss": false})));
    daemon.wait("s", "concluded");
    let jobs = daemon.must("query-jobs", json!({}));
    let expected = "8192 bytes of the image's file, in 2 ranges, have changed on disk; the first that the \
                    disk shows: bytes 0 to 4096";
    assert_eq!(jobs[0]["error"], expected);
    assert_eq!(jobs[0]["type"], "x-vellum-scrub");
    assert_eq!(jobs[0]["current-progress"], jobs[0]["total-progress"]);
    daemon.must("job-dismiss", json!({"id": "s"}));
    // What the backing file has as well is repaired, and told of; the rest is left.
    daemon.must(
        "x-vellum-scrub",
        scrub(json!({"job-id": "r", "repair": true})),
    );
    daemon.wait("r", "null");
    let events = daemon.end();
    let damaged = named(&events, "X_VELLUM_SCRUB_DAMAGE");
    let told = |at: usize| (&damaged[at]["guest"]["start"], &damaged[at]["repaired"]);
    assert_eq!(damaged.len(), 4, "{events:?}");
    assert_eq!(told(2), (&json!(0), &json!(false)));
    assert_eq!(told(3), (&json!(8192), &json!(true)));
    assert_eq!(damaged[3]["node-name"], "top");
    let ended = named(&events, "BLOCK_JOB_COMPLETED");
    let error = ended[1]["error"].as_str().expect("an error");
    assert!(error.starts_with("4096 bytes"), "{error}");
    let words = ["io", "-r", "-c", "read -P 3 8k 56k", "t"];
    let (code, text) = vellum(&place, &words);
    assert!(code == 0 && !text.contains("failed"), "{text}");
}

#[test]
fn a_scrub_that_repairs_everything_is_a_success() {
    let place = summed();
    damage(&place, CLUSTER - 1);
    let mut daemon = start(&place);
    let arguments = scrub(json!({"repair": true, "auto-finalize": false}));
    daemon.must("x-vellum-scrub", arguments);
    daemon.wait("s", "pending");
    daemon.must("job-finalize", json!({"id": "s"}));
    daemon.wait("s", "null");
    let events = daemon.end();
    let ended = named(&events, "BLOCK_JOB_COMPLETED");
    assert_eq!(ended[0].get("error"), None, "{ended:?}");
    assert_eq!(named(&events, "X_VELLUM_SCRUB_DAMAGE").len(), 1);
    let (code, text) = vellum(&place, &["scrub", "--read-only", "t"]);
    assert_eq!(code, 0, "{text}");
}

#[test]
fn guests_write_beside_a_scrub() {
    let place = summed();
    let mut daemon = start(&place);
    // The header's MiB, and then nothing for a long time.
    daemon.must("x-vellum-scrub", scrub(json!({"speed": 1})));
    place.io(
        URI,
        &[
            "write -P 5 64k 300k",
            "write -P 6 1000 3000",
            "discard 512k 64k",
        ],
    );
    daemon.must("job-pause", json!({"id": "s"}));
    daemon.wait("s", "paused");
    place.io(URI, &["write -P 7 128k 64k", "flush"]);
    daemon.must("job-resume", json!({"id": "s"}));
    let speed = json!({"device": "s", "speed": 0});
    daemon.must("block-job-set-speed", speed);
    place.io(URI, &["write -P 8 700k 100k"]);
    daemon.wait("s", "null");
    let events = daemon.end();
    let ended = named(&events, "BLOCK_JOB_COMPLETED");
    assert_eq!(ended[0].get("error"), None, "{ended:?}");
    let (code, text) = vellum(&place, &["scrub", "--read-only", "t"]);
    assert_eq!(code, 0, "{text}");
    place.io(
        "t",
        &[
            "read -P 6 1000 3000",
            "read -P 7 128k 64k",
            "read -P 8 700k 100k",
        ],
    );
}

#[test]
fn a_scrub_is_cancelled_and_keeps_other_jobs_away() {
    let place = summed();
    let grown = [
        "io",
        "-c",
        "write -P 4 0 3M",
        "--image-opts",
        "driver=qcow2,file.filename=g,checksums=on",
    ];
    place.img("create -q -f qcow2 g 4M");
    assert_eq!(vellum(&place, &grown).0, 0);
    let mut daemon = start(&place);
    let mut node = super::qcow2("grown", "g", json!(null));
    node["read-only"] = json!(true);
    daemon.must("blockdev-add", node);
    let refused = |answer: Value, text: &str| assert_eq!(answer["error"]["desc"], text);
    let other = scrub(json!({"device": "grown", "repair": true}));
    let text = "Node 'grown' is read-only: nothing can be repaired";
    refused(daemon.ask("x-vellum-scrub", other), text);
    let other = daemon.ask("x-vellum-scrub", scrub(json!({"device": "base"})));
    let text = "the image has no checksums; checksums=on begins to keep some";
    refused(other, text);
    daemon.must(
        "x-vellum-scrub",
        scrub(json!({"device": "grown", "speed": 1})),
    );
    let busy = "Node 'grown' is busy: block device is in use by block job: x-vellum-scrub";
    let again = scrub(json!({"device": "grown", "job-id": "again"}));
    refused(daemon.ask("x-vellum-scrub", again), busy);
    refused(
        daemon.ask("blockdev-del", json!({"node-name": "grown"})),
        busy,
    );
    daemon.must("job-cancel", json!({"id": "s"}));
    daemon.wait("s", "null");
    daemon.must("blockdev-del", json!({"node-name": "grown"}));
    // The end of the program cancels, too.
    daemon.must(
        "x-vellum-scrub",
        scrub(json!({"job-id": "last", "speed": 1})),
    );
    let events = daemon.end();
    assert_eq!(named(&events, "BLOCK_JOB_CANCELLED").len(), 2, "{events:?}");
}

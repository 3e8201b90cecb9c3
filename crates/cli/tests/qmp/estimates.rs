//! How long a job will still take.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::place::{Daemon, Place};

/// What a job of this speed copies takes 32 s.
const SPEED: u64 = 2 << 20;

fn seconds_left(daemon: &mut Daemon) -> [Option<u64>; 2] {
    ["query-jobs", "query-block-jobs"].map(|command| {
        let jobs: Value = daemon.must(command, json!({}));
        jobs[0]["x-vellum-seconds-left"].as_u64()
    })
}

/// It is told when enough of the job was seen, and not while it is paused.
#[test]
fn a_running_job_tells_how_long_it_will_take() {
    let place = Place::new();
    place.img("create -q -f qcow2 disk 64M");
    place.io("disk", &["write -P 1 0 64M"]);
    let mut daemon = place.ours(
        "--blockdev driver=qcow2,node-name=disk,file.driver=file,file.filename=disk \
             --blockdev driver=null-co,node-name=to,size=64M",
    );
    let mirror = json!({"job-id": "j", "device": "disk", "target": "to", "sync": "full",
                        "speed": SPEED});
    daemon.must("blockdev-mirror", mirror);
    assert_eq!(seconds_left(&mut daemon), [None; 2], "it has just begun");
    let begun = Instant::now();
    let [of_jobs, of_block_jobs] = loop {
        std::thread::sleep(Duration::from_millis(500));
        let told = seconds_left(&mut daemon);
        if told.iter().all(Option::is_some) {
            break told;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "nothing is told");
    };
    // A machine that does much else copies later, but no faster than this.
    for seconds in [of_jobs, of_block_jobs].into_iter().flatten() {
        assert!((8..200).contains(&seconds), "{seconds} s");
    }
    daemon.must("job-pause", json!({"id": "j"}));
    assert_eq!(seconds_left(&mut daemon), [None; 2], "it is paused");
    daemon.must("job-cancel", json!({"id": "j"}));
    daemon.wait("j", "null");
    daemon.end();
}

//! An upgrade: another daemon takes the place of one that guests use, and they go on.

use serde_json::json;

use crate::guest::{DATA_AT, Guest, Queue, header};
use crate::place::Place;

const CONFIG: &str = "[daemon]\nmonitors = ['qmp.sock']\n\
    [[disk]]\nname = 'a'\nimage = 'a'\nformat = 'qcow2'\n\
    [[disk.export]]\ntype = 'vhost-user-blk'\naddr.path = 'guest.sock'\nwritable = true\n";

/// Begins to write a block of 4 KiB.
fn begin(queue: &mut Queue, block: u64, byte: u8) -> u16 {
    let at = DATA_AT + 4096 * block;
    queue.memory.write(at, &[byte; 4096]);
    let head = queue.prepare(&header(1, 8 * block), (at, 4096), false);
    queue.offer(head);
    queue.kick();
    head
}

#[test]
fn a_guest_goes_on_with_the_next_daemon() {
    let place = Place::new();
    place.write("disks.toml", CONFIG);
    let words = ["--config", "disks.toml", "--state", "state"];
    let mut service = place.serve(&words);
    let mut guest = Guest::boot(&place.path("guest.sock"), 1, 0);
    // What the guest sees is an overlay that the file does not know of.
    let mut client = place.monitor();
    let snapshot = json!({
        "node-name": "a", "snapshot-file": "over", "snapshot-node-name": "over",
        "format": "qcow2",
    });
    client.must("blockdev-snapshot-sync", snapshot);
    for round in 1..=6_u8 {
        let running: Vec<u16> = (0..12)
            .map(|block| begin(&mut guest.queues[0], block, round))
            .collect();
        // An upgrade ends it in order, an accident does not; the guest sees no difference.
        match round % 2 {
            0 => service.end(),
            _ => service.kill(),
        }
        service = place.serve(&words);
        guest.reconnect(&place.path("guest.sock"));
        let queue = &mut guest.queues[0];
        let mut left = running;
        while !left.is_empty() {
            let (head, _) = queue.wait_used();
            let at = left.iter().position(|&other| other == head);
            left.swap_remove(at.expect("a request that runs"));
            assert_eq!(queue.status(head), 0, "round {round}");
        }
        for block in 0..12 {
            let read = queue.read_disk(8 * block, 4096);
            assert!(
                read == (0, vec![round; 4096]),
                "block {block} in round {round}"
            );
        }
    }
    let mut client = place.monitor();
    let exports = client.must("query-block-exports", json!({}));
    assert_eq!(exports[0]["node-name"], "over");
    service.end();
}

//! A server that dies, and the one after it.

use super::guest::{DATA_AT, Guest, header};
use super::{Seen, Server, disk, writable};
use std::sync::Arc;

#[test]
fn what_a_dead_server_had_begun_is_done_by_the_next_in_its_order() {
    let (device, storage) = disk();
    // A server that begins requests and answers none, as one that is killed.
    let stuck = Arc::new(Seen::that_stalls(device.clone()));
    let mut first = Server::start(stuck.clone(), writable());
    let mut guest = Guest::boot(&first.socket(), 1, 0);
    let queue = &mut guest.queues[0];
    let mut heads = Vec::new();
    for number in 0..5_u8 {
        let at = DATA_AT + 4096 * u64::from(number);
        queue.memory.write(at, &[number + 1; 1024]);
        // Each over half of the one before.
        let head = queue.prepare(&header(1, u64::from(number)), (at, 1024), false);
        queue.offer(head);
        queue.kick();
        heads.push(head);
        stuck.wait_for_writes(usize::from(number) + 1);
    }
    let second = Server::start(device, writable());
    guest.reconnect(&second.socket());
    let queue = &mut guest.queues[0];
    let begin = std::time::Instant::now();
    while queue.call.read().is_err() {
        assert!(begin.elapsed() < super::guest::PATIENCE, "nobody is told");
    }
    for head in heads {
        assert_eq!(queue.wait_used().0, head);
        assert_eq!(queue.status(head), 0);
    }
    let held = storage.snapshot();
    for number in 0..5 {
        assert_eq!(held[512 * number], number as u8 + 1);
    }
    assert_eq!(queue.write_disk(0, &[77; 512]), 0, "and goes on");
    stuck.go_on();
    first.end();
}

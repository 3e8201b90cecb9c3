//! A server that dies, and the one after it.

use std::sync::Arc;

use vellum::{BlockDevice, Raw, RawOptions};
use vellum_io::lane::block_on;
use vhost::VhostBackend;

use super::guest::{DATA_AT, Guest, NEXT, Queue, header};
use super::{DISK_BYTES, Options, Seen, Server, disk, writable};

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

/// What a server before has noted is as long as the guest says by then.
#[test]
fn requests_take_64_mib_and_one_at_a_time_those_that_were_left_too() {
    const LEN: usize = 16 << 20;
    let storage = Arc::new(vellum_storage::MemStorage::with_bytes(vec![0; LEN]));
    let device = Raw::open(storage, RawOptions::default()).expect("a device");
    let stuck = Arc::new(Seen::that_stalls(device.clone()));
    let mut first = Server::start(stuck.clone(), writable());
    let mut guest = Guest::boot(&first.socket(), 1, 0);
    let offer = |queue: &mut Queue, len| {
        let head = queue.prepare(&header(1, 0), (DATA_AT, len), false);
        queue.offer(head);
        queue.kick();
        head
    };
    let mut heads: Vec<u16> = (0..8).map(|_| offer(&mut guest.queues[0], 512)).collect();
    stuck.wait_for_writes(8);
    for &head in &heads {
        let data = (DATA_AT, LEN as u32, NEXT, head + 2);
        guest.queues[0].set_descriptor(head + 1, data);
    }
    let stalling = Arc::new(Seen::that_stalls(device));
    let mut second = Server::start(stalling.clone(), writable());
    guest.reconnect(&second.socket());
    let queue = &mut guest.queues[0];
    heads.extend((0..8).map(|_| offer(queue, LEN as u32)));
    stalling.wait_for_writes(4);
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert_eq!(stalling.writes(), 4);
    // The queue stands still only when all that was left is done.
    stalling.go_on();
    guest.client.get_vring_base(0).expect("stopped");
    let queue = &mut guest.queues[0];
    assert!(queue.used_index() >= 8 && stalling.writes() >= 8);
    guest.start_queue(0);
    let queue = &mut guest.queues[0];
    let mut used: Vec<u16> = heads.iter().map(|_| queue.wait_used().0).collect();
    used.sort_unstable();
    heads.sort_unstable();
    assert_eq!(used, heads);
    stuck.go_on();
    first.end();
    second.end();
}

/// A guest that has written to the end and to the start of a disk, and whose server dies.
struct Killed {
    device: Arc<dyn BlockDevice>,
    storage: Arc<vellum_storage::MemStorage>,
    seen: Arc<Seen>,
    server: Server,
    guest: Guest,
}

impl Killed {
    fn new() -> Killed {
        let (device, storage) = disk();
        // Not known to hand everything on: so what is written is kept for the next server.
        let seen = Arc::new(Seen::around(device.clone()));
        let server = Server::start(seen.clone(), writable());
        let mut guest = Guest::boot(&server.socket(), 1, 0);
        let last = (DISK_BYTES / 512) as u64 - 1;
        assert_eq!(guest.queues[0].write_disk(last, &[7; 512]), 0);
        assert_eq!(guest.queues[0].write_disk(0, &[8; 512]), 0);
        Killed {
            device,
            storage,
            seen,
            server,
            guest,
        }
    }

    fn resize(&self, size_bytes: usize) {
        let resized = block_on(async { self.device.truncate(size_bytes as u64).await });
        resized.expect("another size");
    }

    /// Goes on with another server; what the disk holds then.
    fn go_on(mut self) -> Vec<u8> {
        self.seen.stall();
        let second = Server::start(Arc::new(Seen::around(self.device)), writable());
        self.guest.reconnect(&second.socket());
        let written = self.guest.queues[0].write_disk(1, &[9; 512]);
        assert_eq!(written, 0, "it goes on");
        let held = self.storage.snapshot();
        self.seen.go_on();
        self.server.end();
        held
    }
}

#[test]
fn what_lies_behind_the_end_of_a_shorter_disk_is_left_out_by_the_next_server() {
    let killed = Killed::new();
    // Before anybody was told.
    killed.resize(DISK_BYTES / 2);
    let held = killed.go_on();
    assert_eq!((held.len(), held[0], held[512]), (DISK_BYTES / 2, 8, 9));
}

#[test]
fn what_a_shrink_has_cut_off_does_not_come_back_with_the_next_server() {
    let killed = Killed::new();
    for size_bytes in [DISK_BYTES / 2, DISK_BYTES] {
        killed.resize(size_bytes);
        killed.server.update_size();
    }
    let held = killed.go_on();
    assert_eq!((held[0], held[512], held[DISK_BYTES - 1]), (8, 9, 0));
}

/// The client frees the memory for requests in flight once the rings have stopped, as at a reset of the
/// device: a kill after that finds no log, though the guest goes on.
#[test]
fn a_device_that_is_reset_or_left_has_flushed_what_it_acknowledged() {
    let (device, _storage) = disk();
    let seen = Arc::new(Seen::around(device));
    let server = Server::start(seen.clone(), writable());
    let mut guest = Guest::boot(&server.socket(), 2, 0);
    let before = seen.flushes();
    for queue in &mut guest.queues {
        assert_eq!(queue.write_disk(0, &[1; 512]), 0);
    }
    guest.client.get_vring_base(0).expect("stopped");
    assert_eq!(seen.flushes(), before, "the other queue runs");
    guest.client.get_vring_base(1).expect("stopped");
    assert_eq!(seen.flushes(), before + 1, "the last ring has stopped");

    for index in 0..2 {
        guest.start_queue(index);
    }
    assert_eq!(guest.queues[0].write_disk(0, &[2; 512]), 0);
    guest.client.reset_owner().expect("reset");
    assert!(guest.config(0, 8).len() == 8, "the reset is over");
    assert_eq!(seen.flushes(), before + 2, "the owner was reset");

    guest.reconnect_after_hanging_up(&server.socket());
    assert_eq!(guest.queues[0].write_disk(0, &[3; 512]), 0);
    let before = seen.flushes();
    guest.in_flight = None;
    guest.start();
    assert!(seen.flushes() > before, "the memory was replaced");
}

/// Without memory for requests in flight there is no log.
#[test]
fn a_client_without_memory_for_requests_in_flight_has_its_writes_flushed_when_it_leaves() {
    let (device, _storage) = disk();
    let seen = Arc::new(Seen::around(device));
    let mut server = Server::start(seen.clone(), writable());
    let mut guest = Guest::connect(&server.socket());
    guest.agree(0);
    guest.queues = vec![Queue::new(&guest.memory, 0, true)];
    let region = guest.memory.region();
    guest.client.set_mem_table(&[region]).expect("memory");
    guest.start_queue(0);
    assert_eq!(guest.queues[0].write_disk(0, &[1; 512]), 0);
    assert_eq!(seen.flushes(), 0);
    guest.client.get_vring_base(0).expect("stopped");
    assert_eq!(seen.flushes(), 1);
    guest.start_queue(0);
    assert_eq!(guest.queues[0].write_disk(0, &[2; 512]), 0);
    drop(guest);
    server.end();
    assert_eq!(seen.flushes(), 2);
}

/// As the memory is that a server of a raw file makes, or one that writes through.
#[test]
fn writes_go_through_where_the_memory_of_the_client_has_no_log() {
    let (device, _storage) = disk();
    let through = Options {
        write_through: true,
        ..writable()
    };
    let mut first = Server::start(device.clone(), through);
    let mut guest = Guest::boot(&first.socket(), 1, 0);
    first.end();
    let seen = Arc::new(Seen::around(device));
    let second = Server::start(seen.clone(), writable());
    guest.reconnect(&second.socket());
    let queue = &mut guest.queues[0];
    assert_eq!(queue.write_disk(0, &[1; 512]), 0);
    assert_eq!(seen.durable_writes(), 1);
    assert_eq!(queue.ranges(13, &[(0, 8, 0)]), 0);
    assert_eq!(seen.durable_writes(), 2);
    let lines = second.lines();
    assert!(
        lines
            .iter()
            .any(|line| line.contains("has no room for unflushed writes")),
        "{lines:?}"
    );
    // Memory of this server has logs.
    guest.in_flight = None;
    guest.start();
    assert_eq!(guest.queues[0].write_disk(0, &[2; 512]), 0);
    assert_eq!(seen.durable_writes(), 2);
}

//! What a guest that means no harm asks for.

use std::sync::Arc;

use super::guest::{DATA_AT, EVENT_INDEX, Guest, INDIRECT, NEXT, WRITE, header};
use super::{DISK_BYTES, serve, writable};
use vellum_export::vhost_user_blk::Options;

#[test]
fn bytes_go_to_the_disk_and_come_back_through_every_queue() {
    for without in [0, EVENT_INDEX, INDIRECT | EVENT_INDEX] {
        let (server, storage) = serve(writable());
        let mut guest = Guest::boot(&server.socket(), 4, without);
        for number in 0..4_u8 {
            let queue = &mut guest.queues[usize::from(number)];
            let sector = 100 * u64::from(number);
            assert_eq!(queue.read_disk(sector, 4096), (0, vec![0x5a; 4096]));
            assert_eq!(queue.write_disk(sector, &[number; 1024]), 0);
            assert_eq!(queue.flush(), 0);
            let expected = [vec![number; 1024], vec![0x5a; 512]].concat();
            assert_eq!(queue.read_disk(sector, 1536), (0, expected));
        }
        let held = storage.snapshot();
        assert_eq!((held[100 * 512], held[301 * 512]), (1, 3));
        assert_eq!(server.lines(), [""; 0]);
    }
}

#[test]
fn many_requests_at_once_are_each_answered_once() {
    let (server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    let queue = &mut guest.queues[0];
    for round in 0..200_u64 {
        let heads: Vec<u16> = (0..16)
            .map(|number| {
                let at = DATA_AT + 4096 * number;
                queue.prepare(&header(0, (round + number) % 100 * 8), (at, 4096), true)
            })
            .collect();
        for &head in &heads {
            queue.offer(head);
            queue.kick();
        }
        let mut used: Vec<u16> = (0..16).map(|_| queue.wait_used().0).collect();
        assert!(heads.iter().all(|&head| queue.status(head) == 0));
        used.sort_unstable();
        let mut heads = heads;
        heads.sort_unstable();
        assert_eq!(used, heads);
    }
}

#[test]
fn a_chain_of_an_indirect_table_is_a_request() {
    let (server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    let queue = &mut guest.queues[0];
    let (table, head_at, status_at) = (DATA_AT + 65536, DATA_AT + 70000, DATA_AT + 70100);
    queue.memory.write(head_at, &header(0, 1));
    // In parts of odd lengths, and the header cut in two.
    let parts: [(u64, u32, u16, u16); 5] = [
        (head_at, 5, NEXT, 1),
        (head_at + 5, 11, NEXT, 2),
        (DATA_AT, 100, NEXT | WRITE, 3),
        (DATA_AT + 200, 412, NEXT | WRITE, 4),
        (status_at, 1, WRITE, 0),
    ];
    for (number, (address, len, flags, next)) in parts.into_iter().enumerate() {
        let fields: Vec<u8> = [
            &address.to_le_bytes()[..],
            &len.to_le_bytes(),
            &flags.to_le_bytes(),
            &next.to_le_bytes(),
        ]
        .concat();
        queue.memory.write(table + 16 * number as u64, &fields);
    }
    queue.set_descriptor(40, (table, 5 * 16, 4, 0));
    queue.offer(40);
    queue.kick();
    assert_eq!(queue.wait_used(), (40, 513));
    let memory = &queue.memory;
    assert_eq!(memory.read(status_at, 1), [0]);
    assert_eq!(
        memory.read(DATA_AT, 101),
        [vec![0x5a; 100], vec![0]].concat()
    );
    assert_eq!(memory.read(DATA_AT + 200, 412), vec![0x5a; 412]);
}

#[test]
fn discards_and_zeroes_take_several_ranges() {
    let (server, storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    let queue = &mut guest.queues[0];
    assert_eq!(queue.ranges(13, &[(0, 8, 1), (16, 8, 0)]), 0);
    let held = storage.snapshot();
    assert_eq!([held[0], held[8 * 512], held[16 * 512]], [0, 0x5a, 0]);
    assert_eq!(queue.ranges(11, &[(32, 8, 0), (64, 8, 0)]), 0);
    assert_eq!(
        queue.ranges(11, &[(0, 8, 1)]),
        2,
        "a flag of the other kind"
    );
    assert_eq!(queue.ranges(13, &[(u64::MAX, 8, 0)]), 1);
    let sectors = (DISK_BYTES / 512) as u64;
    assert_eq!(
        queue.ranges(13, &[(sectors - 8, 8, 0), (sectors - 7, 8, 0)]),
        1
    );
}

#[test]
fn the_serial_number_is_what_was_asked_for() {
    let (server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    let queue = &mut guest.queues[0];
    let (status, written) = queue.request(&header(8, 0), (DATA_AT, 20), true);
    assert_eq!((status, written), (0, 21));
    assert_eq!(
        queue.memory.read(DATA_AT, 20),
        b"disk-17\0\0\0\0\0\0\0\0\0\0\0\0\0"
    );
    assert_eq!(queue.request(&header(99, 0), (DATA_AT, 20), true).0, 2);
}

#[test]
fn blocks_of_4096_bytes_and_disks_that_are_only_read() {
    let (server, storage) = serve(Options {
        logical_block_bytes: 4096,
        ..Options::default()
    });
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    assert_eq!(guest.config(20, 4), 4096_u32.to_le_bytes());
    let queue = &mut guest.queues[0];
    assert_eq!(queue.read_disk(8, 4096).0, 0);
    assert_eq!(queue.read_disk(1, 4096).0, 1);
    assert_eq!(queue.read_disk(8, 512).0, 1);
    assert_eq!(queue.write_disk(8, &[1; 4096]), 1);
    assert_eq!(queue.ranges(13, &[(0, 8, 0)]), 1);
    assert_eq!(queue.flush(), 0);
    assert!(storage.snapshot().iter().all(|&byte| byte == 0x5a));
}

#[test]
fn a_resize_is_told_to_the_client_and_seen_by_the_guest() {
    use std::sync::Mutex;
    use vhost::vhost_user::VhostUserFrontendReqHandlerMut;
    use vhost::vhost_user::{FrontendReqHandler, HandlerResult, VhostUserFrontend};

    struct Heard(usize);
    impl VhostUserFrontendReqHandlerMut for Heard {
        fn handle_config_change(&mut self) -> HandlerResult<u64> {
            self.0 += 1;
            Ok(0)
        }
    }
    let (device, _storage) = super::disk();
    let server = super::Server::start(device.clone(), writable());
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    let heard = Arc::new(Mutex::new(Heard(0)));
    let mut ear = FrontendReqHandler::new(heard.clone()).expect("a socket");
    let fd = ear.get_tx_raw_fd();
    guest
        .client
        .set_backend_request_fd(&fd)
        .expect("handed over");
    assert_eq!(guest.disk_bytes(), DISK_BYTES as u64);
    server.update_size();
    vellum_io::lane::block_on(async { device.truncate(2 * DISK_BYTES as u64).await })
        .expect("resized");
    server.update_size();
    ear.handle_request().expect("told");
    assert_eq!(heard.lock().expect("heard").0, 1);
    assert_eq!(guest.disk_bytes(), 2 * DISK_BYTES as u64);
    let queue = &mut guest.queues[0];
    assert_eq!(
        queue.read_disk((DISK_BYTES / 512) as u64, 512),
        (0, vec![0; 512])
    );
}

#[test]
fn a_client_that_comes_back_finds_the_disk_and_one_at_a_time_is_served() {
    let (mut server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 2, 0);
    assert_eq!(server.connections(), 1);
    assert_eq!(guest.queues[1].write_disk(3, &[9; 512]), 0);
    for _ in 0..3 {
        guest.reconnect_after_hanging_up(&server.socket());
        assert_eq!(guest.queues[1].read_disk(3, 512), (0, vec![9; 512]));
        assert_eq!(guest.queues[0].flush(), 0);
    }
    server.end();
    assert!(!server.socket().exists());
}

#[test]
fn a_guest_without_a_write_cache_has_its_writes_durable() {
    let (device, _storage) = super::disk();
    let seen = Arc::new(super::Seen::around(device));
    let server = super::Server::start(seen.clone(), writable());
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    assert_eq!(guest.queues[0].write_disk(0, &[1; 512]), 0);
    assert_eq!(seen.durable_writes(), 0);
    guest.set_write_cache(false);
    assert_eq!(guest.config(32, 1), [0]);
    assert_eq!(guest.queues[0].write_disk(0, &[1; 512]), 0);
    assert_eq!(seen.durable_writes(), 1);
    drop(guest);
    // One that can neither flush nor switch the cache.
    let mut guest = Guest::boot(&server.socket(), 1, 1 << 9 | 1 << 11);
    assert_eq!(guest.queues[0].write_disk(0, &[1; 512]), 0);
    assert_eq!(seen.durable_writes(), 2);
}

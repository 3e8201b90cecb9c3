//! Guests and clients that mean harm: the request, the queue or the session fails, with a line that
//! says so, and everybody else goes on.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vellum_io::lane::block_on;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};

use super::guest::{
    DATA_AT, Descriptor, EVENT_INDEX, Guest, MEMORY_AT, MEMORY_BYTES, Memory, NEXT, PATIENCE,
    QUEUE_SIZE, Queue, WRITE, descriptor_bytes, header, place,
};
use super::{DISK_BYTES, Server, disk, serve, writable};

/// Waits for a line that begins so.
fn wait_for_line(server: &Server, start: &str) -> String {
    let begin = Instant::now();
    loop {
        if let Some(line) = server
            .lines()
            .into_iter()
            .find(|line| line.starts_with(start))
        {
            return line;
        }
        assert!(begin.elapsed() < PATIENCE, "{:?}", server.lines());
        std::thread::yield_now();
    }
}

/// Puts descriptors into the table of queue 0 and offers the first; what is said of it.
fn offer(descriptors: &[Descriptor]) -> String {
    let (server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 2, 0);
    let queue = &mut guest.queues[0];
    queue.memory.write(DATA_AT, &header(0, 0));
    for (index, descriptor) in descriptors.iter().enumerate() {
        queue.set_descriptor(index as u16, *descriptor);
    }
    queue.offer(0);
    queue.kick();
    let line = wait_for_line(&server, "queue 0 has stopped: ");
    let begin = Instant::now();
    while queue.error.read().is_err() {
        assert!(begin.elapsed() < PATIENCE, "the client is not told");
    }
    // Nobody else notices.
    assert_eq!(guest.queues[1].read_disk(0, 512), (0, vec![0x5a; 512]));
    // And the queue itself can be set up anew.
    guest.queues[0].set_descriptor(0, (0, 0, 0, 0));
    set_up_anew(&mut guest, 0);
    guest.start();
    assert_eq!(guest.queues[0].read_disk(0, 512), (0, vec![0x5a; 512]));
    line
}

#[test]
fn chains_that_are_none_stop_their_queue() {
    let head = (DATA_AT, 16, NEXT, 1);
    let end = MEMORY_AT + MEMORY_BYTES;
    let cases: &[(&[Descriptor], &str)] = &[
        (&[(DATA_AT, 16, NEXT, 0)], "loops"),
        (&[head, (DATA_AT, 16, NEXT, 0)], "loops"),
        (&[(DATA_AT, 16, NEXT, QUEUE_SIZE)], "of a table of 64"),
        (&[(DATA_AT, 16, NEXT, u16::MAX)], "of a table of 64"),
        (&[(end - 8, 16, 0, 0)], "not in memory"),
        (&[(u64::MAX, 16, 0, 0)], "not in memory"),
        (&[(0, u32::MAX, 0, 0)], "not in memory"),
        (&[head, (DATA_AT, u32::MAX, WRITE, 0)], "not in memory"),
        (&[head, (DATA_AT, 0, WRITE, 0)], "no bytes"),
        (
            &[(DATA_AT, 16, NEXT | WRITE, 1), (DATA_AT, 16, 0, 0)],
            "behind memory to be written",
        ),
        (&[head, (DATA_AT, 512, 0, 0)], "without room for its status"),
        (&[(DATA_AT, 16, 0, 0)], "without room for its status"),
        (&[(DATA_AT, 17, 4, 0)], "an indirect table of 17 bytes"),
        (&[(DATA_AT, 0, 4, 0)], "an indirect table of 0 bytes"),
        (
            &[(DATA_AT, 16 * 2000, 4, 0)],
            "an indirect table of 32000 bytes",
        ),
        (&[(end - 16, 32, 4, 0)], "not in memory"),
        (&[(DATA_AT, 32, 4 | NEXT, 1)], "another one behind"),
        (&[head, (DATA_AT, 32, 4, 0)], "amid a chain"),
    ];
    for (descriptors, expected) in cases {
        let line = offer(descriptors);
        assert!(line.contains(expected), "{line}");
    }
}

#[test]
fn an_index_that_cannot_be_stops_its_queue() {
    for index in [QUEUE_SIZE + 1, u16::MAX] {
        let (server, _storage) = serve(writable());
        let guest = Guest::boot(&server.socket(), 1, 0);
        guest.queues[0].set_available_index(index);
        guest.queues[0].kick.write(1).expect("a kick");
        wait_for_line(&server, "queue 0 has stopped: the guest claims");
    }
    let (server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    guest.queues[0].offer(QUEUE_SIZE);
    guest.queues[0].kick.write(1).expect("a kick");
    wait_for_line(&server, "queue 0 has stopped: descriptor 64");
}

#[test]
fn absurd_requests_fail_and_their_queue_goes_on() {
    let (server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    let queue = &mut guest.queues[0];
    let data = (DATA_AT, 512);
    for (kind, sector) in [(0, u64::MAX), (0, 1 << 54), (1, 8192), (1, 8191 + 2)] {
        let writes = kind == 0;
        assert_eq!(queue.request(&header(kind, sector), data, writes).0, 1);
    }
    assert_eq!(queue.request(&header(0, 0), (DATA_AT, 511), true).0, 1);
    assert_eq!(queue.request(&header(0, 0)[..15], data, true).0, 1);
    assert_eq!(queue.request(&header(11, 0), (DATA_AT, 17), false).0, 1);
    assert_eq!(queue.request(&header(7, 0), data, true).0, 2);
    assert_eq!(queue.read_disk(0, 512).0, 0);
    assert_eq!(server.lines(), [""; 0]);
}

/// The status lies amid the data, and the data over the ring.
#[test]
fn memory_that_overlaps_is_only_the_guests_own_harm() {
    let (server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 2, 0);
    let queue = &mut guest.queues[0];
    queue.memory.write(DATA_AT, &header(0, 0));
    let base = queue.base();
    queue.set_descriptor(0, (DATA_AT, 16, NEXT, 1));
    queue.set_descriptor(1, (base, 4096, NEXT | WRITE, 2));
    queue.set_descriptor(2, (DATA_AT, 1, WRITE, 0));
    queue.offer(0);
    queue.kick();
    assert_eq!(queue.wait_used(), (0, 4097));
    assert_eq!(guest.queues[1].read_disk(0, 512), (0, vec![0x5a; 512]));
}

#[test]
fn queues_that_are_moved_stopped_and_set_up_twice_lose_no_request() {
    let (server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 2, 0);
    for round in 0..50 {
        let queue = &mut guest.queues[0];
        let head = queue.prepare(&header(0, 0), (DATA_AT, 4096), true);
        queue.offer(head);
        queue.kick.write(1).expect("a kick");
        let base = queue.base();
        match round % 5 {
            0 => guest.client.set_vring_enable(0, false).expect("disabled"),
            1 => {
                guest.client.get_vring_base(0).expect("stopped");
            }
            2 => {
                let region = guest.memory.region();
                guest.client.set_mem_table(&[region]).expect("memory");
            }
            3 => guest
                .client
                .set_vring_addr(0, &place(&guest.memory, base))
                .expect("moved"),
            _ => guest
                .client
                .set_vring_kick(0, &guest.queues[0].kick)
                .expect("a kick"),
        }
        guest
            .client
            .set_vring_kick(0, &guest.queues[0].kick)
            .expect("a kick");
        guest.client.set_vring_enable(0, true).expect("enabled");
        guest.queues[0].kick.write(1).expect("a kick");
        assert_eq!(guest.queues[0].wait_used().0, head);
        assert_eq!(guest.queues[0].status(head), 0);
    }
    assert_eq!(server.lines(), [""; 0]);
}

#[test]
fn memory_that_is_taken_away_stops_the_queue_that_lies_there() {
    let (server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    assert_eq!(guest.queues[0].read_disk(0, 512).0, 0);
    let region = guest.memory.region();
    guest.client.remove_mem_region(&region).expect("removed");
    wait_for_line(&server, "queue 0 has stopped: a ring of 518 bytes");
    assert!(guest.client.remove_mem_region(&region).is_err());
    guest.client.add_mem_region(&region).expect("added");
    assert!(guest.client.add_mem_region(&region).is_err(), "it is there");
    guest
        .client
        .set_vring_kick(0, &guest.queues[0].kick)
        .expect("a kick");
    assert_eq!(guest.queues[0].read_disk(0, 512).0, 0);
}

#[test]
fn what_a_client_is_refused_leaves_its_queues_as_they_are() {
    let (server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    let region = guest.memory.region();
    let (_, area) = guest.in_flight.take().expect("an area");
    let too_small = VhostUserInflight::new(8, 0, 1, QUEUE_SIZE);
    let elsewhere = VhostUserMemoryRegionInfo {
        guest_phys_addr: 0x1000,
        ..region
    };
    for message in 0..3 {
        let answer = match message {
            0 => guest.client.add_mem_region(&region).map(drop),
            1 => guest.client.remove_mem_region(&elsewhere),
            _ => guest.client.set_inflight_fd(&too_small, area.as_raw_fd()),
        };
        assert!(answer.is_err(), "{message}");
        let queue = &mut guest.queues[0];
        assert_eq!(queue.read_disk(0, 512), (0, vec![0x5a; 512]));
        // Where the client's area says how many requests are done.
        let mut used = [0; 2];
        area.read_exact_at(&mut used, 14).expect("the area");
        assert_eq!(u16::from_ne_bytes(used), queue.used_index());
    }
}

#[test]
fn rings_outside_of_memory_or_not_aligned_stop_their_queue() {
    let (server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    let good = place(&guest.memory, guest.queues[0].base());
    let mut bad = good;
    bad.used_ring_addr += MEMORY_BYTES;
    guest.client.set_vring_addr(0, &bad).expect("taken");
    wait_for_line(&server, "queue 0 has stopped: a ring of 518 bytes");
    bad = good;
    bad.avail_ring_addr += 1;
    guest.client.set_vring_addr(0, &bad).expect("taken");
    wait_for_line(&server, "queue 0 has stopped: a ring at");
    guest.client.set_vring_addr(0, &good).expect("taken");
    assert_eq!(guest.queues[0].read_disk(0, 512).0, 0);
}

#[test]
fn clients_that_break_the_protocol_are_given_up_and_the_next_is_served() {
    use std::io::{Read, Write};
    let (server, _storage) = serve(writable());
    let mut random = fastrand::Rng::with_seed(17);
    for round in 0..100 {
        let mut stream = std::os::unix::net::UnixStream::connect(server.socket()).expect("in");
        let mut noise: Vec<u8> = (0..random.usize(1..200)).map(|_| random.u8(..)).collect();
        if round % 2 == 0 {
            // A header that is one, and anything behind it.
            let head = [random.u32(..45), 1, random.u32(..64)]
                .map(u32::to_ne_bytes)
                .concat();
            noise.splice(0..0, head);
        }
        // It may have been hung up on.
        let _ = stream.write_all(&noise);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    }
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    assert_eq!(guest.queues[0].read_disk(0, 512).0, 0);
}

#[test]
fn a_client_that_stalls_does_not_hold_up_the_end() {
    use std::io::Write;
    let (mut server, _storage) = serve(writable());
    let mut stream = std::os::unix::net::UnixStream::connect(server.socket()).expect("in");
    stream.write_all(&[1, 0, 0]).expect("said");
    let _waiting = std::os::unix::net::UnixStream::connect(server.socket()).expect("in");
    let begin = Instant::now();
    server.end();
    assert!(begin.elapsed() < PATIENCE / 3);
}

#[test]
fn descriptors_of_other_kinds_do_no_harm() {
    let (server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 2, 0);
    let other = Memory::new();
    // A kick that is memory: it could always be read.
    let file = other.file.try_clone().expect("a file");
    let kick = std::mem::ManuallyDrop::new(as_event(file));
    assert!(guest.client.set_vring_kick(0, &kick).is_err());
    wait_for_line(&server, "a descriptor that counts no events");
    // Nor is it a socket.
    let socket = kick.try_clone().expect("a descriptor");
    guest.client.set_backend_request_fd(&socket).expect("taken");
    server.update_size();
    assert_eq!(guest.queues[1].read_disk(0, 512).0, 0);
}

fn as_event(file: std::fs::File) -> vmm_sys_util::eventfd::EventFd {
    use std::os::fd::{FromRawFd, IntoRawFd};
    // SAFETY: the descriptor is given away, and is never used as what it is not.
    unsafe { vmm_sys_util::eventfd::EventFd::from_raw_fd(file.into_raw_fd()) }
}

fn borrow(counter: &vmm_sys_util::eventfd::EventFd) -> std::os::fd::BorrowedFd<'_> {
    // SAFETY: it stays open as long as the counter.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(std::os::fd::AsRawFd::as_raw_fd(counter)) }
}

/// Fills a counter, and has whoever adds to it wait.
fn fill(counter: &vmm_sys_util::eventfd::EventFd) {
    while counter.write(u64::MAX - 1).is_err() {
        // It was signalled before.
        let _ = counter.read();
    }
    let counter = borrow(counter);
    let flags = rustix::fs::fcntl_getfl(counter).expect("flags");
    rustix::fs::fcntl_setfl(counter, flags - rustix::fs::OFlags::NONBLOCK).expect("set");
}

/// Makes room in a counter when it is dropped, so that a test that fails ends.
struct MakesRoom(vmm_sys_util::eventfd::EventFd);

impl Drop for MakesRoom {
    fn drop(&mut self) {
        // What fails here has failed before.
        let _ = rustix::io::ioctl_fionbio(borrow(&self.0), true);
        let _ = self.0.read();
    }
}

/// Whether a write to a full counter waits is the client's to say, at any time.
#[test]
fn full_counters_that_are_waited_for_hold_up_neither_requests_nor_the_end() {
    let (mut server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 1, EVENT_INDEX);
    let queue = &mut guest.queues[0];
    let another =
        vmm_sys_util::eventfd::EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK).expect("an event");
    let rooms = [&queue.call, &another].map(|counter| {
        let counter = counter.try_clone().expect("a descriptor");
        MakesRoom(counter)
    });
    fill(&queue.call);
    for count in 1..=3 {
        let head = queue.prepare(&header(4, 0), (0, 0), false);
        queue.offer(head);
        queue.kick.write(1).expect("a kick");
        let begin = Instant::now();
        while queue.used_index() < count {
            assert!(begin.elapsed() < PATIENCE / 3, "nothing goes on");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    wait_for_line(&server, "queue 0: an event counter is full");
    // Once more while the export ends.
    another.write(1).expect("room");
    guest.client.set_vring_call(0, &another).expect("taken");
    fill(&another);
    let head = guest.queues[0].prepare(&header(4, 0), (0, 0), false);
    guest.queues[0].offer(head);
    guest.queues[0].kick.write(1).expect("a kick");
    let (ended, end) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let server = &mut server;
        scope.spawn(move || {
            server.end();
            ended.send(()).expect("awaited");
        });
        let ended = end.recv_timeout(PATIENCE / 3);
        drop(rooms);
        assert_eq!(ended, Ok(()), "the export does not end");
    });
}

/// Does something while `harm` goes on again and again, and ends that in any case.
fn beside<T>(mut harm: impl FnMut() + Send, work: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let begin = Instant::now();
            while !is_over.load(Ordering::SeqCst) && begin.elapsed() < PATIENCE {
                harm();
            }
        });
        let begin = Instant::now();
        let done = work();
        is_over.store(true, Ordering::SeqCst);
        assert!(begin.elapsed() < PATIENCE, "nothing else had its turn");
        done
    })
}

/// Has a queue that has stopped begin anew, at the next start.
fn set_up_anew(guest: &mut Guest, index: usize) {
    guest.client.get_vring_base(index).expect("stopped");
    let queue = Queue::new(&guest.memory, index, guest.features & EVENT_INDEX != 0);
    queue.set_available_index(0);
    queue.set_used_index(0);
    guest.queues[index] = queue;
    guest.in_flight = None;
}

#[test]
fn descriptors_that_change_while_they_are_read_harm_their_queue_alone() {
    let (server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 2, 0);
    let (memory, base) = (guest.memory.clone(), guest.queues[0].base());
    let mut random = fastrand::Rng::with_seed(35);
    let change = || {
        // Reads, flushes, the serial, and what is unknown: what the disk holds stays.
        let kind = [0, 4, 8, 99][random.usize(..4)];
        memory.write(DATA_AT, &header(kind, random.u64(..16_384)));
        for index in 0..4 {
            let address = match random.u8(..4) {
                0 => random.u64(..),
                1 => base + random.u64(..4096),
                _ => DATA_AT + random.u64(..8192),
            };
            let len = [16, 512, 4096, u32::MAX][random.usize(..4)];
            let flags = random.u16(..8);
            let descriptor = descriptor_bytes((address, len, flags, random.u16(..5)));
            memory.write(base + 16 * index, &descriptor);
        }
    };
    beside(change, || {
        for _ in 0..300 {
            guest.queues[0].offer(0);
            guest.queues[0].kick.write(1).expect("a kick");
            assert_eq!(guest.queues[1].read_disk(0, 512), (0, vec![0x5a; 512]));
            if guest.queues[0].error.read().is_ok() {
                set_up_anew(&mut guest, 0);
                guest.start();
            }
        }
    });
    assert!(
        server
            .lines()
            .iter()
            .all(|line| line.starts_with("queue 0 has stopped: "))
    );
    assert!(!server.lines().is_empty(), "nothing was changed in time");
}

#[test]
fn memory_that_is_taken_away_under_requests_stays_until_they_end() {
    let (server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    let region = guest.memory.region();
    for round in 0..100 {
        let queue = &mut guest.queues[0];
        for at in 0..8 {
            let data = (DATA_AT + (at << 20), 1 << 20);
            let head = queue.prepare(&header(0, 0), data, true);
            queue.offer(head);
        }
        queue.kick.write(1).expect("a kick");
        if round % 2 == 0 {
            std::thread::sleep(Duration::from_micros(round * 20));
        }
        guest.client.remove_mem_region(&region).expect("removed");
        set_up_anew(&mut guest, 0);
        guest.start();
        assert_eq!(guest.queues[0].read_disk(0, 512), (0, vec![0x5a; 512]));
    }
}

#[test]
fn a_guest_that_never_runs_out_of_requests_does_not_keep_its_export() {
    let (mut server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    let queue = &mut guest.queues[0];
    // Of a kind that is refused at once, and as long as may be: it takes a while to look at.
    let (table, of_table) = (DATA_AT, 900_u16);
    let data = DATA_AT + (1 << 20);
    queue.memory.write(data, &header(99, 0));
    for index in 0..of_table {
        let (flags, len) = match of_table - index {
            1 => (WRITE, 1),
            _ => (NEXT, 16),
        };
        let at = table + 16 * u64::from(index);
        queue
            .memory
            .write(at, &descriptor_bytes((data, len, flags, index + 1)));
    }
    queue.set_descriptor(0, (table, 16 * u32::from(of_table), 4, 0));
    for _ in 0..QUEUE_SIZE {
        queue.offer(0);
    }
    queue.kick();
    let queue = &guest.queues[0];
    let ask_for_more = || queue.set_available_index(queue.used_index().wrapping_add(QUEUE_SIZE));
    beside(ask_for_more, || server.end());
}

#[test]
fn a_client_that_asks_for_no_answers_does_not_keep_others_waiting() {
    let (server, _storage) = serve(writable());
    let mut client = UnixStream::connect(server.socket()).expect("a socket");
    // SET_OWNER of version 1, without a payload.
    let message = [3_u32, 1, 0].map(u32::to_le_bytes).concat();
    let messages = message.repeat(4096);
    let flood = || {
        // The last ones may find nobody.
        let _ = client.write_all(&messages);
    };
    beside(flood, || {
        for _ in 0..200 {
            assert!(server.connections() <= 1);
        }
        drop(server);
    });
}

#[test]
fn a_client_that_does_not_read_what_it_is_told_holds_up_no_resize() {
    let (device, _storage) = disk();
    let server = Server::start(device.clone(), writable());
    let mut guest = Guest::boot(&server.socket(), 1, 0);
    let (_kept, handed_over) = UnixStream::pair().expect("a pair");
    handed_over.set_nonblocking(true).expect("set");
    while (&handed_over).write(&[0; 4096]).is_ok() {}
    let set = guest.client.set_backend_request_fd(&handed_over);
    set.expect("handed over");
    let server = Arc::new(server);
    for size_bytes in [DISK_BYTES / 2, DISK_BYTES] {
        let resized = block_on(async { device.truncate(size_bytes as u64).await });
        resized.expect("another size");
        let (told, hears) = std::sync::mpsc::channel();
        let teller = server.clone();
        std::thread::spawn(move || {
            teller.update_size();
            let _ = told.send(());
        });
        hears
            .recv_timeout(PATIENCE)
            .expect("it waits for the client");
    }
}

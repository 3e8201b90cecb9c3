//! A guest that moves to another host while it runs: its client is told which memory was written.

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use vhost::{VhostBackend, VhostUserDirtyLogRegion};

use super::guest::{DATA_AT, Guest, LOG_ALL, MEMORY_AT, MEMORY_BYTES, PATIENCE, header, place};
use super::{serve, writable};

const PAGE_BYTES: u64 = 4096;

/// The bits that a client and the server share.
struct Log {
    file: std::fs::File,
    len_bytes: u64,
}

impl Log {
    fn new() -> Log {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = std::fs::File::from(rustix::fs::memfd_create("log", flags).expect("memory"));
        let len_bytes = ((MEMORY_AT + MEMORY_BYTES) / PAGE_BYTES).div_ceil(8);
        file.set_len(len_bytes).expect("a length");
        Log { file, len_bytes }
    }

    fn region(&self) -> VhostUserDirtyLogRegion {
        VhostUserDirtyLogRegion {
            mmap_size: self.len_bytes,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    /// The pages whose bits are set.
    fn pages(&self) -> Vec<u64> {
        let mut bits = vec![0; self.len_bytes as usize];
        self.file.read_exact_at(&mut bits, 0).expect("bits");
        let is_set = |page: &u64| bits[(page / 8) as usize] >> (page % 8) & 1 == 1;
        (0..8 * self.len_bytes).filter(is_set).collect()
    }

    /// The pages whose bits are set, and no more from now on. Nothing is marked meanwhile.
    fn take(&self) -> Vec<u64> {
        let pages = self.pages();
        let none = vec![0; self.len_bytes as usize];
        self.file.write_all_at(&none, 0).expect("none");
        pages
    }
}

impl Log {
    /// As [`Log::take`], once there are so many: a request is seen as used before its pages are marked, since
    /// whoever copies a page must find its bit afterwards.
    fn wait(&self, count: usize) -> Vec<u64> {
        let begin = std::time::Instant::now();
        while self.pages().len() < count {
            assert!(begin.elapsed() < PATIENCE, "{:?}", self.pages());
        }
        self.take()
    }
}

/// Has the server log, or not any more, as a client does beside running queues.
fn set_logging(guest: &Guest, log: &Log, on: bool) {
    if on {
        guest
            .client
            .set_log_base(0, Some(log.region()))
            .expect("taken");
    }
    let features = if on {
        guest.features | LOG_ALL
    } else {
        guest.features
    };
    guest.client.set_features(features).expect("agreed");
    for queue in &guest.queues {
        let mut addresses = place(&guest.memory, queue.base());
        if on {
            addresses.flags = 1;
            addresses.log_addr = Some(queue.used_ring());
        }
        guest
            .client
            .set_vring_addr(queue.index, &addresses)
            .expect("taken");
    }
}

#[test]
fn memory_that_requests_write_is_told_and_no_other() {
    let (server, _storage) = serve(writable());
    let mut guest = Guest::boot(&server.socket(), 2, 0);
    assert_eq!(
        guest.client.get_features().expect("features") & LOG_ALL,
        LOG_ALL
    );
    let log = Log::new();
    assert_eq!(guest.queues[0].read_disk(0, 4096).0, 0);
    set_logging(&guest, &log, true);
    assert_eq!(log.take(), [0; 0], "nothing was asked for since");
    // What a request wrote, its status, and the used ring.
    let queue = &mut guest.queues[0];
    let status = queue.status_page();
    let ring = queue.used_ring() / PAGE_BYTES;
    let data = (DATA_AT + 5 * PAGE_BYTES + 512, 3 * PAGE_BYTES as u32);
    assert_eq!(queue.request(&header(0, 0), data, true).0, 0);
    let first = data.0 / PAGE_BYTES;
    assert_eq!(
        log.wait(6),
        [ring, status, first, first + 1, first + 2, first + 3]
    );
    // A write to the disk changes no memory, nor does what is refused but its status.
    assert_eq!(queue.write_disk(8, &[7; 512]), 0);
    assert_eq!(log.wait(2), [ring, status]);
    assert_eq!(queue.request(&header(99, 0), (DATA_AT, 512), false).0, 2);
    assert_eq!(log.wait(2), [ring, status]);
    // Another log in the middle, as for a guest that has got more memory; the other queue tells, too.
    let other = Log::new();
    guest
        .client
        .set_log_base(0, Some(other.region()))
        .expect("taken");
    assert_eq!(guest.queues[1].read_disk(0, 512).0, 0);
    assert_eq!((other.wait(3).len(), log.take().len()), (3, 0));
    set_logging(&guest, &log, false);
    assert_eq!(guest.queues[0].read_disk(0, 512).0, 0);
    assert_eq!((log.take().len(), other.take().len()), (0, 0));
    assert_eq!(server.lines(), [""; 0]);
}

//! A queue's bytes without a guest, a client or a device: for the fuzzer and the corpus of it.

use std::os::fd::AsFd;
use std::sync::Arc;

use vellum_io::shared_memory::SharedMemory;
use vellum_io::{Error, Result};

use super::chain::walk;
use super::config::Geometry;
use super::memory::GuestMemory;
use super::message::{RegionDescription, RingAddresses};
use super::request::{Work, parse};
use super::ring::{Ring, RingPlace};

/// Where the parts of the queue lie in the memory, which the guest sees at 0.
const AVAILABLE_AT: u64 = 16 << 10;
const USED_AT: u64 = 24 << 10;

/// What came of the bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TakenApart {
    /// Requests that were understood or refused.
    pub requests: usize,
    /// Ranges of memory that they would read or write.
    pub ranges: usize,
    /// What stopped the queue.
    pub stopped: Option<String>,
}

/// Takes the queue apart that lies in `memory` (its descriptors at 0, its available ring at 16 KiB,
/// its used ring at 24 KiB), and answers every request without doing anything.
///
/// # Errors
/// What the system says if there is no memory.
pub fn take_apart(memory: &[u8], queue_size: u16, indirect: bool) -> Result<TakenApart> {
    let failed = |errno: rustix::io::Errno| Error::from_errno("make memory", errno.raw_os_error());
    let len_bytes = memory.len() as u64;
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = rustix::fs::memfd_create("queue", flags).map_err(failed)?;
    rustix::fs::ftruncate(&file, len_bytes).map_err(failed)?;
    let mapped = Arc::new(SharedMemory::map(file.as_fd(), 0, len_bytes)?);
    if let Some(all) = mapped.range(0, len_bytes) {
        all.copy_from(0, memory);
    }
    let mut guest = GuestMemory::default();
    let place = RegionDescription {
        guest_address: 0,
        len_bytes,
        client_address: 0,
        offset_bytes: 0,
    };
    guest.add(place, file)?;
    let mut taken = TakenApart::default();
    if let Err(error) = taken.run(&guest, queue_size, indirect) {
        taken.stopped = Some(error.message().to_owned());
    }
    Ok(taken)
}

impl TakenApart {
    fn run(&mut self, memory: &GuestMemory, size: u16, indirect: bool) -> Result<()> {
        let place = RingPlace {
            size,
            addresses: RingAddresses {
                descriptors: 0,
                available: AVAILABLE_AT,
                used: USED_AT,
                used_for_log: None,
            },
            next_available: 0,
            event_index: true,
        };
        let disk = Geometry {
            size_bytes: 1 << 20,
            logical_block_bytes: 512,
            discard_alignment_bytes: 512,
            queues: 1,
            read_only: false,
            write_back: true,
        };
        let mut ring = Ring::find(&place, memory)?;
        // Answers may change the ring, so that it would go on for ever.
        while self.requests < usize::from(size)
            && let Some(head) = ring.next_head()?
        {
            let chain = walk(&ring, memory, head, indirect)?;
            self.ranges += chain.readable.len() + chain.writable.len();
            let request = parse(chain, &disk)?;
            let status = match &request.work {
                Ok(Work::Read { offset_bytes, .. } | Work::Write { offset_bytes, .. }) => {
                    assert!(*offset_bytes < disk.size_bytes + 1, "beyond the end");
                    super::request::Status::Ok
                }
                Ok(_) => super::request::Status::Ok,
                Err(status) => *status,
            };
            request.status.write(status);
            ring.push_used(head, 1);
            ring.wants_signal();
            self.requests += 1;
        }
        ring.ask_for_kick();
        Ok(())
    }
}

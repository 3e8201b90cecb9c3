//! A guest's driver: libblkio's, one thread for each queue, so many requests in flight on each.

use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};

use super::load::{BLOCK_BYTES, Load};
use crate::random::Random;

/// A client that has connected.
pub struct Client {
    load: Load,
    region: MemoryRegion,
    queues: Vec<Blkioq>,
    // Dropped last: the queues are its.
    _device: Blkio,
}

fn said(error: blkio::Error) -> anyhow::Error {
    anyhow!("the client says: {}", error.message())
}

impl Client {
    /// Connects and sets the queues up.
    pub fn connect(socket: &Path, load: &Load) -> Result<Self> {
        let path = socket.to_str().context("the path of a socket is text")?;
        let mut device = Blkio::new("virtio-blk-vhost-user").map_err(said)?;
        device.set_str("path", path).map_err(said)?;
        device.connect().map_err(said)?;
        let queues = i32::try_from(load.clients)?;
        device.set_i32("num-queues", queues).map_err(said)?;
        let outcome = device.start().map_err(said)?;
        let disk_bytes = device.get_u64("capacity").map_err(said)?;
        ensure!(
            disk_bytes == load.disk_bytes,
            "a disk of {disk_bytes} bytes"
        );
        let len = load.clients * load.depth * BLOCK_BYTES as usize;
        let region = device
            .alloc_mem_region(len.next_multiple_of(2 << 20))
            .map_err(said)?;
        device.map_mem_region(&region).map_err(said)?;
        Ok(Client {
            load: *load,
            region,
            queues: outcome.queues,
            _device: device,
        })
    }

    /// How many requests have ended while it was measured: `mark` is called when that begins, after
    /// a time to get warm, and when it ends.
    pub fn run(self, warm: Duration, mut mark: impl FnMut()) -> Result<u64> {
        let Client {
            load,
            region,
            queues,
            _device,
        } = self;
        let (counts, ends) = (AtomicBool::new(false), AtomicBool::new(false));
        let ready = Barrier::new(queues.len() + 1);
        let total = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (index, queue) in queues.into_iter().enumerate() {
                let memory = region.addr + index * load.depth * BLOCK_BYTES as usize;
                let driver = Driver {
                    queue,
                    memory,
                    random: Random::new(index as u64 + 1),
                    load,
                };
                let (ready, counts, ends) = (&ready, &counts, &ends);
                threads.push(scope.spawn(move || {
                    ready.wait();
                    driver.drive(counts, ends)
                }));
            }
            ready.wait();
            std::thread::sleep(warm);
            mark();
            counts.store(true, Ordering::SeqCst);
            std::thread::sleep(load.duration);
            counts.store(false, Ordering::SeqCst);
            mark();
            ends.store(true, Ordering::SeqCst);
            let mut total = 0;
            for thread in threads {
                let joined = thread.join();
                total += joined.map_err(|_| anyhow!("a thread of the client has panicked"))??;
            }
            anyhow::Ok(total)
        })?;
        ensure!(total > 0, "no request has ended");
        Ok(total)
    }
}

/// One queue's thread.
struct Driver {
    queue: Blkioq,
    memory: usize,
    random: Random,
    load: Load,
}

impl Driver {
    fn drive(mut self, counts: &AtomicBool, ends: &AtomicBool) -> Result<u64> {
        for slot in 0..self.load.depth {
            self.begin(slot);
        }
        let room = (0..self.load.depth).map(|_| MaybeUninit::<Completion>::uninit());
        let mut done: Vec<_> = room.collect();
        let mut counted = 0;
        let mut in_flight = self.load.depth;
        while in_flight > 0 {
            let ended = self.queue.do_io(&mut done, 1, None, None).map_err(said)?;
            if counts.load(Ordering::Relaxed) {
                counted += ended as u64;
            }
            let goes_on = !ends.load(Ordering::Relaxed);
            for completion in &done[..ended] {
                // SAFETY: the call has filled in as many as it says.
                let completion = unsafe { completion.assume_init_ref() };
                ensure!(completion.ret == 0, "a request failed: {}", completion.ret);
                if goes_on {
                    self.begin(completion.user_data);
                } else {
                    in_flight -= 1;
                }
            }
        }
        Ok(counted)
    }

    fn begin(&mut self, slot: usize) {
        let blocks = self.load.disk_bytes / BLOCK_BYTES;
        let at = self.random.below(blocks) * BLOCK_BYTES;
        let memory = (self.memory + slot * BLOCK_BYTES as usize) as *mut u8;
        let (len, flags) = (BLOCK_BYTES as usize, ReqFlags::empty());
        match self.load.writes {
            true => self.queue.write(at, memory, len, slot, flags),
            false => self.queue.read(at, memory, len, slot, flags),
        }
    }
}

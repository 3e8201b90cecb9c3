//! Guests that reset their device, leave it, or come back with other memory for requests in flight, between kills
//! of the server. The guest never loses power: all that was acknowledged is there, flushed or not.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use vellum::raw::RawOptions;
use vellum::{BlockDevice, Buffer, Error, ErrorKind, Io, Raw, RequestFlags, ZeroRequest, delegate};
use vellum_storage::MemStorage;
use vhost::VhostBackend;

use super::guest::{Guest, Memory, Queue};
use super::{Options, Server, writable};

const SECTORS: usize = 48;
const SEEDS: u64 = 30;
const STEPS: usize = 60;

/// A disk that loses what was not flushed when its server is killed.
#[derive(Debug)]
struct Volatile {
    device: Arc<dyn BlockDevice>,
    cache: Arc<MemStorage>,
    durable: Arc<Mutex<Vec<u8>>>,
    is_killed: AtomicBool,
}

impl Volatile {
    fn new(durable: Arc<Mutex<Vec<u8>>>) -> Arc<Volatile> {
        let bytes = durable.lock().expect("bytes").clone();
        let cache = Arc::new(MemStorage::with_bytes(bytes));
        let device = Raw::open(cache.clone(), RawOptions::default()).expect("a device");
        Arc::new(Volatile {
            device,
            cache,
            durable,
            is_killed: AtomicBool::new(false),
        })
    }

    fn kill(&self) {
        self.is_killed.store(true, Ordering::SeqCst);
    }

    /// Makes bytes durable, unless the server is dead.
    fn keep(&self, offset_bytes: u64, bytes: &[u8]) {
        if !self.is_killed.load(Ordering::SeqCst) {
            let at = offset_bytes as usize;
            let mut durable = self.durable.lock().expect("bytes");
            durable[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }
}

impl BlockDevice for Volatile {
    delegate!(device: info, size_bytes, read, discard, block_status, truncate, close);

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        if flags.fua {
            self.keep(offset_bytes, &buffer);
        }
        self.device.write(offset_bytes, buffer, flags)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        if request.fua {
            self.keep(offset_bytes, &vec![0; len_bytes as usize]);
        }
        self.device.write_zeroes(offset_bytes, len_bytes, request)
    }

    fn flush(&self) -> Io<()> {
        if self.is_killed.load(Ordering::SeqCst) {
            return Io::ready(Err(Error::new(
                ErrorKind::Io,
                "flush",
                "the server is dead",
            )));
        }
        self.keep(0, &self.cache.snapshot());
        self.device.flush()
    }
}

/// A guest with a server, and what its disk holds.
struct Play {
    random: fastrand::Rng,
    durable: Arc<Mutex<Vec<u8>>>,
    device: Arc<Volatile>,
    server: Server,
    guest: Guest,
    held: Vec<u8>,
    steps: Vec<u32>,
}

impl Play {
    fn new(seed: u64) -> Play {
        let mut random = fastrand::Rng::with_seed(seed);
        let durable = Arc::new(Mutex::new(vec![0; SECTORS * 512]));
        let device = Volatile::new(durable.clone());
        let server = Server::start(device.clone(), writable());
        let guest = Guest::boot(&server.socket(), random.usize(1..4), 0);
        Play {
            random,
            durable,
            device,
            server,
            guest,
            held: vec![0; SECTORS],
            steps: Vec::new(),
        }
    }

    fn step(&mut self) {
        let step = self.random.u32(..12);
        self.steps.push(step);
        // Shown if a request does not end.
        println!("step {step}");
        match step {
            0..=4 => self.write(),
            5 => self.flush(),
            6 => self.restart(),
            7 => self.reset(),
            8 => self.boot_another_kernel(),
            9 => self.guest.reconnect_after_hanging_up(&self.server.socket()),
            10 => self.take_foreign_memory(),
            _ => self.kill(),
        }
    }

    fn queue(&mut self) -> &mut Queue {
        let index = self.random.usize(..self.guest.queues.len());
        &mut self.guest.queues[index]
    }

    fn write(&mut self) {
        let sector = self.random.usize(..SECTORS);
        let value = self.random.u8(..);
        let done = match self.random.u8(..8) {
            0 => {
                self.held[sector] = 0;
                self.queue().ranges(13, &[(sector as u64, 1, 0)])
            }
            _ => {
                self.held[sector] = value;
                self.queue().write_disk(sector as u64, &[value; 512])
            }
        };
        assert_eq!(done, 0, "{:?}", self.steps);
    }

    fn flush(&mut self) {
        assert_eq!(self.queue().flush(), 0, "{:?}", self.steps);
    }

    fn stop(&mut self) {
        for index in 0..self.guest.queues.len() {
            self.guest.client.get_vring_base(index).expect("stopped");
        }
    }

    /// Stops the rings and starts them again, as a guest does that is paused.
    fn restart(&mut self) {
        self.stop();
        for index in 0..self.guest.queues.len() {
            self.guest.start_queue(index);
        }
    }

    /// As QEMU at a reset of the device: the memory for requests in flight goes.
    fn reset(&mut self) {
        self.stop();
        if self.random.bool() {
            self.guest.client.reset_owner().expect("reset");
            // Nothing that was agreed upon is left.
            let features = self.guest.features;
            self.guest.agree(!features);
        }
        self.guest.in_flight = None;
        self.guest.start();
    }

    /// As kexec: other queues in other memory, and no driver that has left the device in order.
    fn boot_another_kernel(&mut self) {
        self.stop();
        let count = self.random.usize(1..4);
        self.guest.memory = Memory::new();
        self.guest.in_flight = None;
        let event_index = self.guest.queues[0].event_index;
        self.guest.queues = (0..count)
            .map(|index| Queue::new(&self.guest.memory, index, event_index))
            .collect();
        self.guest.start();
    }

    /// Goes on with memory for requests in flight that another server made, which keeps no log.
    fn take_foreign_memory(&mut self) {
        let through = Options {
            write_through: true,
            ..writable()
        };
        let (other, _) = super::serve(through);
        let queues = self.guest.queues.len();
        let foreign = Guest::boot(&other.socket(), queues, 0);
        self.stop();
        self.guest.in_flight = foreign.in_flight;
        self.guest.start();
    }

    fn kill(&mut self) {
        self.device.kill();
        self.device = Volatile::new(self.durable.clone());
        let next = Server::start(self.device.clone(), writable());
        let mut dead = std::mem::replace(&mut self.server, next);
        self.guest.reconnect(&self.server.socket());
        dead.end();
    }

    fn look(&mut self) {
        for sector in 0..SECTORS {
            let (status, bytes) = self.queue().read_disk(sector as u64, 512);
            let expected = vec![self.held[sector]; 512];
            let steps = &self.steps;
            assert!(
                status == 0 && bytes == expected,
                "sector {sector}: {steps:?}"
            );
        }
    }
}

#[test]
fn acknowledged_writes_outlive_resets_and_kills() {
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let mut play = Play::new(seed);
        for step in 0..STEPS {
            play.step();
            if step % 8 == 7 {
                play.look();
            }
        }
        play.kill();
        play.look();
    }
}

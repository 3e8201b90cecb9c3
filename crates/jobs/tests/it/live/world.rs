//! Guests that use a disk, each sectors of its own, and know what they have written.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::nodes::Link;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Extent, Io, RequestFlags, Storage, ZeroRequest, delegate};
use vellum_io::lane::yield_now;
use vellum_io::{JoinHandle, spawn};
use vellum_storage::MemStorage;

pub const SIZE_BYTES: u64 = 1 << 20;
pub const SECTOR_BYTES: u64 = 512;
const SECTORS: u64 = SIZE_BYTES / SECTOR_BYTES;
const GUESTS: u64 = 4;

/// Random numbers by a seed, for several guests in turn.
#[derive(Debug)]
pub struct Dice(RefCell<fastrand::Rng>);

impl Dice {
    fn new(seed: u64) -> Rc<Dice> {
        println!("seed {seed}");
        Rc::new(Dice(RefCell::new(fastrand::Rng::with_seed(seed))))
    }

    pub fn below(&self, end: u64) -> u64 {
        self.0.borrow_mut().u64(..end)
    }
}

/// A device whose requests take their time, so that others come between.
#[derive(Debug)]
struct Slow(Arc<dyn BlockDevice>, u64);

impl Slow {
    /// Waits for as many turns as an offset says, before or after the request itself.
    fn late<T: 'static>(
        &self,
        offset_bytes: u64,
        begin: impl FnOnce(&dyn BlockDevice) -> Io<T> + 'static,
    ) -> Io<T> {
        let (device, seed) = (self.0.clone(), self.1);
        Io::task(spawn(async move {
            let mixed = (offset_bytes / SECTOR_BYTES).wrapping_mul(seed | 1) >> 3;
            for _ in 0..mixed % 7 {
                yield_now().await;
            }
            let result = begin(&*device).await;
            for _ in 0..(mixed >> 5) % 7 {
                yield_now().await;
            }
            result
        }))
    }
}

impl BlockDevice for Slow {
    delegate!(0: info, size_bytes, truncate, close, backing);
    fn read(&self, at: u64, buffer: Buffer) -> Io<Buffer> {
        self.late(at, move |device| device.read(at, buffer))
    }
    fn write(&self, at: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        self.late(at, move |device| device.write(at, buffer, flags))
    }
    fn write_compressed(&self, at: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        self.late(at, move |device| device.write_compressed(at, buffer, flags))
    }
    fn write_zeroes(&self, at: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        self.late(at, move |device| {
            device.write_zeroes(at, len_bytes, request)
        })
    }
    fn discard(&self, at: u64, len_bytes: u64) -> Io<()> {
        self.late(at, move |device| device.discard(at, len_bytes))
    }
    fn flush(&self) -> Io<()> {
        self.late(0, |device| device.flush())
    }
    fn block_status(&self, at: u64, len_bytes: u64, max_depth: u32) -> Io<Extent> {
        self.late(at, move |device| {
            device.block_status(at, len_bytes, max_depth)
        })
    }
}

/// What every sector holds: the byte that fills it.
type Model = Rc<RefCell<Vec<u8>>>;

pub struct World {
    pub dice: Rc<Dice>,
    seed: u64,
    model: Model,
    /// What the guests use.
    pub disk: Arc<Link>,
    over: Rc<Cell<bool>>,
    guests: Vec<JoinHandle<()>>,
}

pub async fn image(file: &Arc<dyn Storage>, backing: Backing) -> Arc<dyn BlockDevice> {
    let options = OpenOptions::default().backing(backing);
    let image = Qcow2::open(file.clone(), Arc::new(DenyAll), options).await;
    image.expect("an image")
}

pub async fn new_file(cluster_size_bytes: u64) -> Arc<dyn Storage> {
    let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let options = CreateOptions::default()
        .size_bytes(SIZE_BYTES)
        .cluster_size_bytes(cluster_size_bytes);
    create(file.clone(), None, &options)
        .await
        .expect("an image");
    file
}

/// One guest: it writes, zeroes, discards and reads sectors that are its own, among those
/// of others in the same clusters, one request after the other.
async fn guest(number: u64, disk: Arc<Link>, model: Model, dice: Rc<Dice>, over: Rc<Cell<bool>>) {
    while !over.get() {
        let sector = dice.below(SECTORS / GUESTS) * GUESTS + number;
        let (at, byte) = (sector * SECTOR_BYTES, dice.below(255) as u8 + 1);
        let index = sector as usize;
        match dice.below(8) {
            0 => {
                let request = ZeroRequest::default().may_unmap(dice.below(2) == 0);
                disk.write_zeroes(at, SECTOR_BYTES, request)
                    .await
                    .expect("zeroes");
                model.borrow_mut()[index] = 0;
            }
            1 | 2 => {
                let read = disk
                    .read(at, Buffer::for_read(512))
                    .await
                    .expect("a sector");
                let expected = model.borrow()[index];
                assert!(
                    read.iter().all(|found| *found == expected),
                    "sector {sector}"
                );
            }
            3 => disk.flush().await.expect("a flush"),
            _ => {
                let bytes = Buffer::copy_of(&[byte; 512]);
                let write = disk.write(at, bytes, RequestFlags::default());
                write.await.expect("a write");
                model.borrow_mut()[index] = byte;
            }
        }
        yield_now().await;
    }
}

impl World {
    pub fn new(seed: u64, disk: Arc<dyn BlockDevice>) -> World {
        let mut world = World {
            dice: Dice::new(seed),
            seed,
            model: Rc::new(RefCell::new(vec![0; SECTORS as usize])),
            disk: Link::new(disk),
            over: Rc::default(),
            guests: Vec::new(),
        };
        for number in 0..GUESTS {
            let (disk, model) = (world.disk.clone(), world.model.clone());
            let (dice, over) = (world.dice.clone(), world.over.clone());
            world
                .guests
                .push(spawn(guest(number, disk, model, dice, over)));
        }
        world
    }

    pub fn slow(&self, device: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
        Arc::new(Slow(device, self.seed.wrapping_mul(0x9E37_79B9)))
    }

    /// Lets the guests work for a while.
    pub async fn pass(&self, turns: u64) {
        for _ in 0..self.dice.below(turns) {
            yield_now().await;
        }
    }

    pub async fn end(&mut self) {
        self.over.set(true);
        for guest in self.guests.drain(..) {
            guest.await;
        }
    }

    pub async fn check(&self, device: &Arc<dyn BlockDevice>, what: &str) {
        let bytes = device.read(0, Buffer::for_read(SIZE_BYTES as usize)).await;
        let bytes = bytes.expect("the disk");
        for (sector, expected) in self.model.borrow().iter().enumerate() {
            let found = &bytes[sector * 512..][..512];
            assert!(
                found == [*expected; 512],
                "seed {}: {what}: sector {sector} holds {} and not {expected}",
                self.seed,
                found[0]
            );
        }
    }
}

//! A raw image whose format was only guessed: whatever clients do to its first sector, in
//! whatever order it lands, the next guess is raw again.

use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::task::Poll;

use vellum::{
    BlockDevice, Buffer, ErrorKind, Io, Raw, RawOptions, RequestFlags, Storage, ZeroRequest,
    delegate,
};
use vellum_graph::probe::{PROBE_BYTES, Probed, probe};
use vellum_graph::probed_raw::ProbedRaw;
use vellum_io::{lane, spawn};
use vellum_storage::MemStorage;

const SECTOR: usize = 512;

/// A device whose requests take their turns in an order that a seed decides, and that looks
/// at its first sector after each.
#[derive(Debug)]
struct Slow {
    inner: Arc<Raw>,
    memory: Arc<MemStorage>,
    random: Mutex<fastrand::Rng>,
}

impl Slow {
    fn later<T: Send + 'static>(
        &self,
        request: impl FnOnce(Arc<Raw>) -> Io<T> + Send + 'static,
    ) -> Io<T> {
        let (inner, memory) = (self.inner.clone(), self.memory.clone());
        let mut turns = self.random.lock().expect("no panic").u8(..8);
        Io::task(spawn(async move {
            poll_fn(|context| {
                if turns == 0 {
                    return Poll::Ready(());
                }
                turns -= 1;
                context.waker().wake_by_ref();
                Poll::Pending
            })
            .await;
            let done = request(inner).await;
            assert_eq!(guess(&memory), Probed::Raw, "the image changes its format");
            done
        }))
    }
}

impl BlockDevice for Slow {
    delegate!(inner: info, size_bytes, flush, block_status, resize, close);

    fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        self.later(move |inner| inner.read(offset_bytes, buffer))
    }
    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        self.later(move |inner| inner.write(offset_bytes, buffer, flags))
    }
    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        self.later(move |inner| inner.write_zeroes(offset_bytes, len_bytes, request))
    }
    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.later(move |inner| inner.discard(offset_bytes, len_bytes))
    }
    fn truncate(&self, size_bytes: u64) -> Io<()> {
        self.later(move |inner| inner.truncate(size_bytes))
    }
}

/// What the file would be taken for now.
fn guess(memory: &MemStorage) -> Probed {
    let bytes = memory.snapshot();
    probe(&bytes[..bytes.len().min(PROBE_BYTES)])
}

fn device(content: &[u8], seed: u64) -> (Arc<dyn BlockDevice>, Arc<MemStorage>) {
    let memory = Arc::new(MemStorage::with_bytes(content.to_vec()));
    let file: Arc<dyn Storage> = memory.clone();
    let inner = Raw::open(file, RawOptions::default()).expect("a device");
    let slow = Slow {
        inner,
        memory: memory.clone(),
        random: Mutex::new(fastrand::Rng::with_seed(seed)),
    };
    (ProbedRaw::new(Arc::new(slow)), memory)
}

/// First sectors of other formats.
fn sectors() -> Vec<(&'static str, Vec<u8>)> {
    let sector = |at: usize, magic: &[u8]| {
        let mut bytes = vec![0; SECTOR];
        bytes[at..at + magic.len()].copy_from_slice(magic);
        bytes
    };
    vec![
        (
            "qcow2",
            sector(0, b"QFI\xfb\0\0\0\x03\0\0\0\0\0\0\0\x68\0\0\0\x0b"),
        ),
        ("qcow", sector(0, b"QFI\xfb\0\0\0\x01")),
        ("qed", sector(0, b"QED\0")),
        ("luks", sector(0, b"LUKS\xba\xbe\0\x01")),
        ("vdi", sector(64, b"\x7f\x10\xda\xbe")),
        ("vpc", sector(0, b"conectix")),
        (
            "vmdk text",
            sector(0, b"# Disk DescriptorFile\nversion=1\n"),
        ),
    ]
}

/// Has the pieces of a sector written all at once; whether one was refused.
async fn write_pieces(
    device: &Arc<dyn BlockDevice>,
    sector: &[u8],
    unit: usize,
    seed: u64,
) -> bool {
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed ^ 77);
    let mut order: Vec<usize> = (0..sector.len().div_ceil(unit)).collect();
    random.shuffle(&mut order);
    let mut running = Vec::new();
    for piece in order {
        let at = piece * unit;
        let bytes = &sector[at..sector.len().min(at + unit)];
        let (offset, len) = (at as u64, bytes.len() as u64);
        let zeroes = bytes.iter().all(|byte| *byte == 0);
        running.push(match random.u8(..3) {
            0 if zeroes => device.write_zeroes(offset, len, ZeroRequest::default()),
            1 if zeroes => device.discard(offset, len),
            _ => {
                let io = device.write(offset, Buffer::copy_of(bytes), RequestFlags::default());
                Io::task(spawn(async move { io.await.map(drop) }))
            }
        });
    }
    let mut refused = false;
    for request in running {
        if let Err(error) = request.await {
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
            assert_eq!(error.errno(), libc::EPERM);
            refused = true;
        }
    }
    refused
}

#[test]
fn pieces_of_a_header_in_flight_together_never_make_one() {
    for (name, sector) in sectors() {
        for unit in [1, 3, 8, 100, 512] {
            for seed in 0..6 {
                lane::block_on(async {
                    let (device, memory) = device(&[0xaa; 4096], seed);
                    let refused = write_pieces(&device, &sector, unit, seed).await;
                    assert!(refused, "{name} in pieces of {unit}, seed {seed}");
                    assert_eq!(guess(&memory), Probed::Raw, "{name} by {unit}, seed {seed}");
                });
            }
        }
    }
}

#[test]
fn pieces_from_several_lanes_never_make_a_header() {
    for (name, sector) in sectors() {
        for seed in 0..8 {
            let (device, memory) = device(&[0xaa; 4096], seed);
            std::thread::scope(|scope| {
                for lane in 0..4 {
                    let (device, sector) = (&device, &sector);
                    scope.spawn(move || {
                        lane::block_on(write_pieces(device, sector, 3, seed + lane));
                        lane::finish();
                    });
                }
            });
            assert_eq!(guess(&memory), Probed::Raw, "{name}, seed {seed}");
        }
    }
}

#[test]
fn zeroes_and_discards_that_complete_a_header_are_refused_and_others_are_not() {
    lane::block_on(async {
        let (device, _) = device(b"QED!", 1);
        let zeroes = |at, len| device.write_zeroes(at, len, ZeroRequest::default());
        let refusal = zeroes(3, 1).await.expect_err("it makes a QED image");
        assert_eq!(refusal.errno(), libc::EPERM);
        device.discard(3, 509).await.expect_err("so does this");
        device
            .truncate(3)
            .await
            .expect_err("and this, with what follows");
        zeroes(4, 508).await.expect("nothing but zeroes");
        zeroes(0, 512).await.expect("all of them");
        let data = Buffer::copy_of(b"D\0");
        device
            .write(2, data, RequestFlags::default())
            .await
            .expect("no format begins so");
        device.truncate(1024).await.expect("longer");
        device.truncate(0).await.expect("empty");
    });
}

#[test]
fn a_disk_that_grows_from_nothing_can_be_written() {
    lane::block_on(async {
        let (device, memory) = device(b"", 1);
        let header = &sectors()[0].1;
        let write =
            |at, bytes: &[u8]| device.write(at, Buffer::copy_of(bytes), RequestFlags::default());
        write(0, header).await.expect_err("a header");
        write(0, b"data").await.expect("data");
        write(600, b"data").await.expect("data");
        assert_eq!(memory.snapshot()[..4], *b"data");
    });
}

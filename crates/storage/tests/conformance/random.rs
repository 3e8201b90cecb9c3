//! Random requests, several at a time, against the plainest model: bytes.
//!
//! Each round cuts a part of the storage into neighbouring pieces of any
//! alignment and changes all of them at once: what shares a block must not lose
//! the other's bytes.

use std::sync::Arc;

use futures_util::future::join_all;
use vellum_io::lane::block_on;
use vellum_io::{Buffer, Buffers, Io};
use vellum_storage::{Storage, WriteFlags, ZeroFlags};

use crate::everywhere;

const SIZE_BYTES: usize = 96 << 10;
const ROUNDS: usize = 60;

/// The same requests every time.
struct Random(fastrand::Rng);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0.usize(..limit)
    }

    /// A place to cut: often on a sector, sometimes on any byte.
    fn cut(&mut self) -> usize {
        match self.below(3) {
            0 => self.below(SIZE_BYTES),
            1 => self.below(SIZE_BYTES / 512) * 512,
            _ => self.below(SIZE_BYTES / 4096) * 4096,
        }
    }
}

/// Starts a random change of a range and makes it in the model too.
fn change(
    random: &mut Random,
    storage: &dyn Storage,
    model: &mut [u8],
    from: usize,
    to: usize,
) -> Io<()> {
    let (offset, len) = (from as u64, (to - from) as u64);
    let fua = random.below(8) == 0;
    match random.below(6) {
        0 => {
            model[from..to].fill(0);
            storage.discard(offset, len)
        }
        1 | 2 => {
            model[from..to].fill(0);
            let may_unmap = random.below(2) == 0;
            storage.write_zeroes(
                offset,
                len,
                ZeroFlags {
                    may_unmap,
                    no_fallback: false,
                    fua,
                },
            )
        }
        _ => {
            let mut bytes = Buffer::for_read(to - from);
            bytes
                .iter_mut()
                .for_each(|byte| *byte = random.below(255) as u8 + 1);
            model[from..to].copy_from_slice(&bytes);
            let head = bytes.split_to(random.below(to - from));
            let buffers = Buffers::from_iter([head, bytes]);
            storage
                .write(offset, buffers, WriteFlags { fua })
                .map_buffers(drop)
        }
    }
}

fn round(random: &mut Random, storage: &Arc<dyn Storage>, model: &mut [u8]) -> Vec<Io<()>> {
    let mut cuts: Vec<usize> = (0..2 + random.below(7)).map(|_| random.cut()).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2)
        .map(|ends| change(random, &**storage, model, ends[0], ends[1]))
        .collect()
}

#[test]
fn random_neighbours_keep_apart() {
    everywhere(|storage| {
        let mut random = Random(fastrand::Rng::with_seed(0x5eed_0bad_cafe));
        let mut model = vec![0; SIZE_BYTES];
        block_on(async {
            for number in 0..ROUNDS {
                for result in join_all(round(&mut random, &storage, &mut model)).await {
                    result.unwrap();
                }
                if random.below(10) == 0 {
                    let end = random.cut();
                    model[end..].fill(0);
                    storage.truncate(end as u64).await.unwrap();
                }
                let from = random.below(SIZE_BYTES);
                let buffers = Buffers::from_buf([Buffer::for_read(SIZE_BYTES - from)]);
                let read = storage
                    .read(from as u64, buffers)
                    .into_single()
                    .await
                    .unwrap();
                assert!(read[..] == model[from..], "round {number}");
            }
        });
    });
}

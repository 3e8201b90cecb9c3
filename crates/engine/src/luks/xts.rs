//! XTS: what nearly all volumes use, so this one is made to be fast.
//!
//! Every block is masked before and after with a tweak; the first of a sector is its
//! encrypted IV, and each further one the double of the one before. Blocks go through
//! the cipher a sector at a time, so that the processor's pipeline stays full.

use cipher::consts::U16;
use cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, BlockSizeUser};

use super::SECTOR_BYTES;
use super::cipher::Sectors;
use super::iv::Ivs;

const BLOCK_BYTES: usize = 16;
const BLOCKS: usize = SECTOR_BYTES as usize / BLOCK_BYTES;
/// Sectors whose first tweaks are made together.
const GROUP: usize = 8;

/// The masks of a sector, block by block.
type Masks = [u8; SECTOR_BYTES as usize];

/// A cipher in XTS mode with its two keys.
pub(super) struct Xts<C> {
    data: C,
    tweak: C,
    ivs: Ivs,
}

impl<C> Xts<C>
where
    C: BlockCipherEncrypt + BlockCipherDecrypt + BlockSizeUser<BlockSize = U16>,
{
    pub(super) fn new(data: C, tweak: C, ivs: Ivs) -> Self {
        Xts { data, tweak, ivs }
    }

    /// Calls `each` with every sector and its first tweak.
    fn for_each(&self, first: u64, bytes: &mut [u8], mut each: impl FnMut(u128, &mut [u8])) {
        let mut number = first;
        for group in bytes.chunks_mut(GROUP * SECTOR_BYTES as usize) {
            let mut tweaks = [Array::<u8, U16>::default(); GROUP];
            let count = group.len() / SECTOR_BYTES as usize;
            for tweak in &mut tweaks[..count] {
                self.ivs.fill(number, tweak);
                number += 1;
            }
            self.tweak.encrypt_blocks(&mut tweaks[..count]);
            for (tweak, sector) in tweaks
                .iter()
                .zip(group.chunks_exact_mut(SECTOR_BYTES as usize))
            {
                each(u128::from_le_bytes((*tweak).into()), sector);
            }
        }
    }
}

/// All tweaks of a sector.
fn masks(mut tweak: u128) -> Masks {
    let mut masks = [0; SECTOR_BYTES as usize];
    for mask in masks.chunks_exact_mut(BLOCK_BYTES).take(BLOCKS) {
        mask.copy_from_slice(&tweak.to_le_bytes());
        // Doubled in GF(2^128).
        let carry = ((tweak as i128) >> 127) as u128 & 0x87;
        tweak = (tweak << 1) ^ carry;
    }
    masks
}

fn mask(sector: &mut [u8], masks: &Masks) {
    for (byte, mask) in sector.iter_mut().zip(masks) {
        *byte ^= mask;
    }
}

impl<C> Sectors for Xts<C>
where
    C: BlockCipherEncrypt + BlockCipherDecrypt + BlockSizeUser<BlockSize = U16> + Send + Sync,
{
    fn encrypt(&self, first: u64, bytes: &mut [u8]) {
        self.for_each(first, bytes, |tweak, sector| {
            let masks = masks(tweak);
            mask(sector, &masks);
            self.data
                .encrypt_blocks(Array::slice_as_chunks_mut(sector).0);
            mask(sector, &masks);
        });
    }

    fn decrypt(&self, first: u64, bytes: &mut [u8]) {
        self.for_each(first, bytes, |tweak, sector| {
            let masks = masks(tweak);
            mask(sector, &masks);
            self.data
                .decrypt_blocks(Array::slice_as_chunks_mut(sector).0);
            mask(sector, &masks);
        });
    }
}

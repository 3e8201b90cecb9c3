//! The simple modes: a sector is a message of its own, with the IV of its number.

use cbc::{Decryptor, Encryptor};
use cipher::{
    Array, Block, BlockCipherDecrypt, BlockCipherEncrypt, BlockModeDecrypt, BlockModeEncrypt,
    BlockSizeUser, InnerIvInit, StreamCipher,
};

use super::SECTOR_BYTES;
use super::cipher::Sectors;
use super::iv::Ivs;

/// Calls `each` with the number and the bytes of every sector.
fn sectors(first: u64, bytes: &mut [u8], mut each: impl FnMut(u64, &mut [u8])) {
    for (number, sector) in (first..).zip(bytes.chunks_exact_mut(SECTOR_BYTES as usize)) {
        each(number, sector);
    }
}

fn blocks<C: BlockSizeUser>(bytes: &mut [u8]) -> &mut [Block<C>] {
    Array::slice_as_chunks_mut(bytes).0
}

/// Every block by itself.
pub(super) struct Ecb<C>(pub(super) C);

impl<C: BlockCipherEncrypt + BlockCipherDecrypt + Send + Sync> Sectors for Ecb<C> {
    fn encrypt(&self, _first: u64, bytes: &mut [u8]) {
        self.0.encrypt_blocks(blocks::<C>(bytes));
    }

    fn decrypt(&self, _first: u64, bytes: &mut [u8]) {
        self.0.decrypt_blocks(blocks::<C>(bytes));
    }
}

/// Every block depends on the one before.
pub(super) struct Cbc<C> {
    cipher: C,
    ivs: Ivs,
}

impl<C> Cbc<C> {
    pub(super) fn new(cipher: C, ivs: Ivs) -> Self {
        Cbc { cipher, ivs }
    }
}

impl<C: BlockCipherEncrypt + BlockCipherDecrypt + Send + Sync> Sectors for Cbc<C> {
    fn encrypt(&self, first: u64, bytes: &mut [u8]) {
        sectors(first, bytes, |number, sector| {
            let mut iv = Block::<C>::default();
            self.ivs.fill(number, &mut iv);
            Encryptor::inner_iv_init(&self.cipher, &iv).encrypt_blocks(blocks::<C>(sector));
        });
    }

    fn decrypt(&self, first: u64, bytes: &mut [u8]) {
        sectors(first, bytes, |number, sector| {
            let mut iv = Block::<C>::default();
            self.ivs.fill(number, &mut iv);
            Decryptor::inner_iv_init(&self.cipher, &iv).decrypt_blocks(blocks::<C>(sector));
        });
    }
}

/// A stream of encrypted counters, for blocks whose counter is as long as `$flavor` says.
macro_rules! counter_mode {
    ($(#[$doc:meta])* $name:ident, $flavor:ident, $size:ty) => {
        $(#[$doc])*
        pub(super) struct $name<C> {
            cipher: C,
            ivs: Ivs,
        }

        impl<C> $name<C> {
            pub(super) fn new(cipher: C, ivs: Ivs) -> Self {
                $name { cipher, ivs }
            }
        }

        impl<C> Sectors for $name<C>
        where
            C: BlockCipherEncrypt + BlockSizeUser<BlockSize = $size> + Send + Sync,
        {
            fn encrypt(&self, first: u64, bytes: &mut [u8]) {
                sectors(first, bytes, |number, sector| {
                    let mut iv = Block::<C>::default();
                    self.ivs.fill(number, &mut iv);
                    let core = ctr::CtrCore::<&C, ctr::flavors::$flavor>::inner_iv_init(
                        &self.cipher,
                        &iv,
                    );
                    ctr::$flavor::from_core(core).apply_keystream(sector);
                });
            }

            fn decrypt(&self, first: u64, bytes: &mut [u8]) {
                self.encrypt(first, bytes);
            }
        }
    };
}

counter_mode!(
    /// A counter that fills blocks of 16 bytes.
    Ctr, Ctr128BE, cipher::consts::U16
);
counter_mode!(
    /// A counter that fills blocks of 8 bytes.
    NarrowCtr, Ctr64BE, cipher::consts::U8
);

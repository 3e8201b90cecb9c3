//! The AES-CBC of old qcow2 images (`encrypt.format=aes`): read only, so that such
//! images can be converted away. Sectors are encrypted by their guest offset, and a
//! wrong passphrase cannot be told from a right one.

use vellum_format::luks::Suite;
use vellum_format::luks::names::{Cipher, Hash, IvGenerator, Mode};
use zeroize::Zeroizing;

use super::cipher::SectorCipher;
use super::{Passphrase, SECTOR_BYTES};
use crate::Result;

const KEY_BYTES: usize = 16;

/// Decrypts the clusters of an image.
#[derive(Debug)]
pub(crate) struct LegacyAes(SectorCipher);

impl LegacyAes {
    /// The cipher of a passphrase: its first 16 bytes are the key.
    pub(crate) fn new(passphrase: &Passphrase) -> Result<Self> {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        let given = passphrase.bytes();
        let length = given.len().min(KEY_BYTES);
        key[..length].copy_from_slice(&given[..length]);
        let suite = Suite {
            cipher: Cipher::Aes128,
            mode: Mode::Cbc,
            iv_generator: IvGenerator::Plain64,
            iv_hash: None,
            hash: Hash::Sha256,
        };
        SectorCipher::new(&suite, &*key).map(LegacyAes)
    }

    /// Decrypts whole sectors that lie at a guest offset.
    pub(crate) fn decrypt(&self, guest_bytes: u64, sectors: &mut [u8]) {
        debug_assert_eq!(guest_bytes % SECTOR_BYTES, 0, "whole sectors");
        self.0.decrypt(guest_bytes / SECTOR_BYTES, sectors);
    }
}

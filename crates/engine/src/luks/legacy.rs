//! The AES-CBC of qcow images and old qcow2 images (`encrypt.format=aes`). Sectors are encrypted by
//! their guest offset, and a wrong passphrase cannot be told from a right one.

use std::sync::Arc;

use vellum_format::luks::Suite;
use vellum_format::luks::names::{Cipher, Hash, IvGenerator, Mode};
use zeroize::Zeroizing;

use super::cipher::SectorCipher;
use super::{EncryptedStorage, GuestEncryption, Passphrase};
use crate::{Result, Storage};

const KEY_BYTES: usize = 16;

impl EncryptedStorage {
    /// What an old image keeps in `inner`: the first 16 bytes of the passphrase are the key. Its sectors count by
    /// guest offset, so see [`EncryptedStorage::placed`] for each cluster.
    pub(crate) fn legacy_aes(inner: Arc<dyn Storage>, passphrase: &Passphrase) -> Result<Self> {
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
        let cipher = SectorCipher::new(&suite, &*key)?;
        Ok(EncryptedStorage::with_cipher(inner, 0, cipher))
    }
}

impl GuestEncryption {
    /// That of an old image, which keeps its guest's data in `data`.
    ///
    /// # Errors
    /// None that a passphrase leads to.
    pub fn legacy_aes(data: Arc<dyn Storage>, passphrase: &Passphrase) -> Result<Self> {
        EncryptedStorage::legacy_aes(data, passphrase).map(GuestEncryption::Legacy)
    }
}

//! [`SectorCipher`]: encrypts and decrypts whole sectors in place.

use std::fmt;

use aes::{Aes128, Aes192, Aes256};
use cast5::Cast5;
use cipher::{BlockCipherDecrypt, BlockCipherEncrypt, BlockSizeUser, KeyInit};
use serpent::Serpent;
use twofish::Twofish;
use vellum_format::luks::Suite;
use vellum_format::luks::names::{Cipher, Mode};

use super::iv::{Ivs, bad_key};
use super::modes::{Cbc, Ctr, Ecb};
use super::xts::Xts;
use crate::Result;

/// Bytes that are encrypted as a unit.
pub const SECTOR_BYTES: u64 = vellum_format::luks::SECTOR_SIZE_BYTES;

/// Encrypts and decrypts sectors with one key.
///
/// Its key schedules are wiped when it is dropped.
pub(crate) struct SectorCipher(Box<dyn Sectors>);

/// A cipher in a mode.
pub(super) trait Sectors: Send + Sync {
    /// Encrypts whole sectors in place, of which the first has the number `first`.
    fn encrypt(&self, first: u64, sectors: &mut [u8]);
    /// Undoes [`Sectors::encrypt`].
    fn decrypt(&self, first: u64, sectors: &mut [u8]);
}

impl SectorCipher {
    /// The cipher of a suite with a key.
    ///
    /// # Errors
    /// If the key does not have the suite's length.
    pub(crate) fn new(suite: &Suite, key: &[u8]) -> Result<Self> {
        let sectors = match suite.cipher {
            Cipher::Aes128 => wide::<Aes128>(suite, key),
            Cipher::Aes192 => wide::<Aes192>(suite, key),
            Cipher::Aes256 => wide::<Aes256>(suite, key),
            Cipher::Serpent128 | Cipher::Serpent192 | Cipher::Serpent256 => {
                wide::<Serpent>(suite, key)
            }
            Cipher::Twofish128 | Cipher::Twofish192 | Cipher::Twofish256 => {
                wide::<Twofish>(suite, key)
            }
            Cipher::Cast5 => narrow(suite, key),
        };
        sectors.map(SectorCipher)
    }

    /// Encrypts whole sectors in place, of which the first has the number `first`.
    pub(crate) fn encrypt(&self, first: u64, sectors: &mut [u8]) {
        self.0.encrypt(first, sectors);
    }

    /// Decrypts whole sectors in place.
    pub(crate) fn decrypt(&self, first: u64, sectors: &mut [u8]) {
        self.0.decrypt(first, sectors);
    }
}

fn keyed<C: KeyInit>(key: &[u8]) -> Result<C> {
    C::new_from_slice(key).map_err(|_| bad_key())
}

/// A cipher with blocks of 16 bytes.
fn wide<C>(suite: &Suite, key: &[u8]) -> Result<Box<dyn Sectors>>
where
    C: KeyInit
        + BlockCipherEncrypt
        + BlockCipherDecrypt
        + BlockSizeUser<BlockSize = cipher::consts::U16>
        + Send
        + Sync
        + 'static,
{
    let ivs = Ivs::new(suite, key)?;
    Ok(match suite.mode {
        Mode::Ecb => Box::new(Ecb(keyed::<C>(key)?)),
        Mode::Cbc => Box::new(Cbc::new(keyed::<C>(key)?, ivs)),
        Mode::Ctr => Box::new(Ctr::new(keyed::<C>(key)?, ivs)),
        Mode::Xts => {
            let (data, tweak) = key.split_at(key.len() / 2);
            Box::new(Xts::new(keyed::<C>(data)?, keyed::<C>(tweak)?, ivs))
        }
    })
}

/// CAST5, the one cipher with blocks of 8 bytes; XTS needs 16.
fn narrow(suite: &Suite, key: &[u8]) -> Result<Box<dyn Sectors>> {
    let ivs = Ivs::new(suite, key)?;
    let cipher: Cast5 = keyed(key)?;
    Ok(match suite.mode {
        Mode::Ecb => Box::new(Ecb(cipher)),
        Mode::Cbc => Box::new(Cbc::new(cipher, ivs)),
        Mode::Ctr => Box::new(super::modes::NarrowCtr::new(cipher, ivs)),
        Mode::Xts => return Err(bad_key()),
    })
}

impl fmt::Debug for SectorCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SectorCipher")
    }
}

#[cfg(test)]
mod tests;

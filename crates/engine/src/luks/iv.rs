//! Where the IV of a sector comes from.

use aes::{Aes128, Aes192, Aes256};
use cipher::{Array, BlockCipherEncrypt, BlockSizeUser, KeyInit};
use serpent::Serpent;
use twofish::Twofish;
use vellum_format::luks::Suite;
use vellum_format::luks::names::{Cipher, Hash, IvGenerator};

use super::hash::digest;
use crate::qcow2::bad_format;
use crate::{Error, ErrorKind, Result};

/// Makes the IVs of sectors.
pub(super) enum Ivs {
    Plain,
    Plain64,
    Essiv(Box<dyn EncryptBlock>),
}

/// A cipher of which single blocks are wanted.
pub(super) trait EncryptBlock: Send + Sync {
    /// Encrypts one block in place; `block` is as long as the cipher's.
    fn encrypt(&self, block: &mut [u8]);
}

impl<C: BlockCipherEncrypt + Send + Sync> EncryptBlock for C {
    fn encrypt(&self, block: &mut [u8]) {
        if let Ok(block) = <&mut Array<u8, <C as BlockSizeUser>::BlockSize>>::try_from(block) {
            self.encrypt_block(block);
        }
    }
}

/// What the crates say of a key of the wrong length.
pub(super) fn bad_key() -> Error {
    Error::new(
        ErrorKind::InvalidImage,
        "decrypt",
        "the key has a wrong length",
    )
}

impl Ivs {
    /// The generator of a suite for a key.
    pub(super) fn new(suite: &Suite, key: &[u8]) -> Result<Ivs> {
        Ok(match suite.iv_generator {
            IvGenerator::Plain => Ivs::Plain,
            IvGenerator::Plain64 => Ivs::Plain64,
            IvGenerator::Essiv => {
                let hash = suite.iv_hash.unwrap_or(Hash::Sha256);
                let cipher = suite
                    .essiv_cipher(hash)
                    .map_err(|error| bad_format("open", &error))?;
                Ivs::Essiv(block_cipher(cipher, &digest(hash, key))?)
            }
        })
    }

    /// Writes the IV of a sector; `iv` is as long as the cipher's block.
    pub(super) fn fill(&self, sector: u64, iv: &mut [u8]) {
        iv.fill(0);
        let number = match self {
            Ivs::Plain => sector & 0xffff_ffff,
            Ivs::Plain64 | Ivs::Essiv(_) => sector,
        };
        let length = iv.len().min(8);
        iv[..length].copy_from_slice(&number.to_le_bytes()[..length]);
        if let Ivs::Essiv(cipher) = self {
            cipher.encrypt(iv);
        }
    }
}

fn block_cipher(cipher: Cipher, key: &[u8]) -> Result<Box<dyn EncryptBlock>> {
    fn of<C: KeyInit + BlockCipherEncrypt + Send + Sync + 'static>(
        key: &[u8],
    ) -> Result<Box<dyn EncryptBlock>> {
        let cipher = C::new_from_slice(key).map_err(|_| bad_key())?;
        Ok(Box::new(cipher))
    }
    match cipher {
        Cipher::Aes128 => of::<Aes128>(key),
        Cipher::Aes192 => of::<Aes192>(key),
        Cipher::Aes256 => of::<Aes256>(key),
        Cipher::Serpent128 | Cipher::Serpent192 | Cipher::Serpent256 => of::<Serpent>(key),
        Cipher::Twofish128 | Cipher::Twofish192 | Cipher::Twofish256 => of::<Twofish>(key),
        Cipher::Cast5 => of::<cast5::Cast5>(key),
    }
}

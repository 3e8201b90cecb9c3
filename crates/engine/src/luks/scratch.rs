//! [`EncryptedStorage::scratch`]: a place for what may not be read once the program has ended.

use std::sync::Arc;

use vellum_format::luks::Suite;
use vellum_format::luks::names::{Cipher, Hash, IvGenerator, Mode};
use zeroize::Zeroizing;

use super::EncryptedStorage;
use super::cipher::SectorCipher;
use super::hash::random;
use crate::{Result, Storage};

const SUITE: Suite = Suite {
    cipher: Cipher::Aes256,
    mode: Mode::Xts,
    iv_generator: IvGenerator::Plain64,
    iv_hash: None,
    hash: Hash::Sha256,
};

impl EncryptedStorage {
    /// Encrypts what is written to `inner`, a storage of zeroes, with a key that is in memory alone
    /// and gone with the result.
    ///
    /// Other than in a volume, sectors of `inner` that are all zeroes were never written, or were
    /// discarded: they read as zeroes. No data is encrypted to that, but by a chance of 2^-4096.
    ///
    /// # Errors
    /// If the system has no random bytes.
    pub fn scratch(inner: Arc<dyn Storage>) -> Result<Self> {
        let mut key = Zeroizing::new(vec![0; SUITE.key_bytes()]);
        random(&mut key)?;
        let cipher = SectorCipher::new(&SUITE, &key)?;
        Ok(EncryptedStorage::with_cipher(inner, 0, cipher).with_holes())
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::lane::block_on;
    use vellum_storage::{MemStorage, WriteFlags};

    use super::*;
    use crate::{Buffer, Buffers};

    const SIZE_BYTES: usize = 1 << 20;

    async fn read(storage: &dyn Storage, at: u64, len: usize) -> Buffer {
        let buffers = Buffers::from_iter([Buffer::copy_of(&vec![3; len])]);
        Buffer::join_all(storage.read(at, buffers).await.expect("bytes"))
    }

    #[test]
    fn what_is_written_is_read_again_and_all_else_is_zeroes() {
        block_on(async {
            let file = Arc::new(MemStorage::with_bytes(vec![0; SIZE_BYTES]));
            let scratch = EncryptedStorage::scratch(file.clone()).expect("a key");
            let mut expected = vec![0; SIZE_BYTES];
            // Whole sectors, and parts of some.
            for (at, len) in [(4096, 300_000), (500_000, 1000), (SIZE_BYTES - 700, 700)] {
                let bytes = Buffers::from_iter([Buffer::copy_of(&vec![7; len])]);
                let written = scratch.write(at as u64, bytes, WriteFlags::default());
                written.await.expect("written");
                expected[at..at + len].fill(7);
            }
            let all = read(&scratch, 0, SIZE_BYTES).await;
            assert!(all[..] == expected[..]);
            let part = read(&scratch, 499_001, 2000).await;
            assert!(part[..] == expected[499_001..][..2000]);
            let below = file.snapshot();
            assert!(
                !below.windows(16).any(|bytes| bytes == [7; 16]),
                "in the clear"
            );
            scratch.discard(4096, 65536).await.expect("discarded");
            expected[4096..4096 + 65536].fill(0);
            assert!(read(&scratch, 0, SIZE_BYTES).await[..] == expected[..]);
            let other = EncryptedStorage::scratch(file).expect("another key");
            assert_ne!(
                read(&other, 100_000, 512).await[..],
                expected[100_000..][..512]
            );
        });
    }
}

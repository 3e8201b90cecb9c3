//! Hashes, and keys from passphrases (PBKDF2).

use std::time::Duration;

use hmac::EagerHash;
use pbkdf2::pbkdf2_hmac;
use sha2::Digest;
use vellum_format::luks::names::Hash;

use crate::{Error, ErrorKind, Result};

/// Calls a function with the type of a hash.
macro_rules! with_hash {
    ($hash:expr, $function:ident($($argument:expr),*)) => {
        match $hash {
            Hash::Md5 => $function::<md5::Md5>($($argument),*),
            Hash::Sha1 => $function::<sha1::Sha1>($($argument),*),
            Hash::Sha224 => $function::<sha2::Sha224>($($argument),*),
            Hash::Sha256 => $function::<sha2::Sha256>($($argument),*),
            Hash::Sha384 => $function::<sha2::Sha384>($($argument),*),
            Hash::Sha512 => $function::<sha2::Sha512>($($argument),*),
            Hash::Ripemd160 => $function::<ripemd::Ripemd160>($($argument),*),
            Hash::Sm3 => $function::<sm3::Sm3>($($argument),*),
        }
    };
}

/// The digest of some bytes.
pub(super) fn digest(hash: Hash, bytes: &[u8]) -> zeroize::Zeroizing<Vec<u8>> {
    fn of<D: Digest>(bytes: &[u8]) -> Vec<u8> {
        D::digest(bytes).to_vec()
    }
    zeroize::Zeroizing::new(with_hash!(hash, of(bytes)))
}

/// Replaces every piece of `block`, as long as a digest, by the digest of its number
/// and itself.
pub(super) fn diffuse(hash: Hash, block: &mut [u8]) {
    fn with<D: Digest>(block: &mut [u8]) {
        for (number, piece) in (0_u32..).zip(block.chunks_mut(<D as Digest>::output_size())) {
            let mut hash = D::new();
            hash.update(number.to_be_bytes());
            hash.update(&*piece);
            piece.copy_from_slice(&hash.finalize()[..piece.len()]);
        }
    }
    with_hash!(hash, with(block));
}

/// Fills `key` with what PBKDF2 makes of a secret.
pub(super) fn derive(hash: Hash, secret: &[u8], salt: &[u8], iterations: u32, key: &mut [u8]) {
    fn with<D: EagerHash>(secret: &[u8], salt: &[u8], iterations: u32, key: &mut [u8]) {
        pbkdf2_hmac::<D>(secret, salt, iterations, key);
    }
    with_hash!(hash, with(secret, salt, iterations, key));
}

/// The first guess of how many iterations take long enough to be timed.
const FIRST_ITERATIONS: u32 = 1 << 15;
/// What takes as long is timed well enough.
const LONG_ENOUGH: Duration = Duration::from_millis(100);

/// How many iterations of a derivation of `key_bytes` bytes this processor makes a
/// second, by the time that the thread itself has run.
pub(super) fn iterations_per_second(hash: Hash, key_bytes: usize) -> u64 {
    let mut key = vec![0; key_bytes];
    let mut iterations = FIRST_ITERATIONS;
    loop {
        let before = thread_time();
        derive(hash, b"password", &[0; 32], iterations, &mut key);
        let taken = thread_time().saturating_sub(before);
        if taken >= LONG_ENOUGH || iterations > u32::MAX / 10 {
            let nanoseconds = taken.as_nanos().max(1);
            let rate = u128::from(iterations) * 1_000_000_000 / nanoseconds;
            return u64::try_from(rate).unwrap_or(u64::MAX);
        }
        iterations *= if taken < LONG_ENOUGH / 20 { 10 } else { 2 };
    }
}

fn thread_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32)
}

/// Fills `bytes` from the system's source of randomness.
pub(super) fn random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|error| {
        let message = format!("Unable to read random bytes: {error}");
        Error::new(ErrorKind::Io, "encrypt", message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn derivations_are_those_of_the_rfc() {
        let mut key = [0; 20];
        derive(Hash::Sha1, b"password", b"salt", 4096, &mut key);
        assert_eq!(hex(&key), "4b007901b765489abead49d926f721d065a429c1");
    }

    #[test]
    fn digests_have_the_length_that_their_hash_says() {
        for hash in Hash::ALL {
            assert_eq!(digest(hash, b"abc").len(), hash.digest_bytes(), "{hash:?}");
        }
        let sm3 = "66c7f0f462eeedd9d1f2d46bdc10e4e24167c4875cf2f7a2297da02b8f4ba8e0";
        assert_eq!(hex(&digest(Hash::Sm3, b"abc")), sm3);
        let ripemd = "8eb208f7e05d987a9b044a8e98c6b087f15a0bfc";
        assert_eq!(hex(&digest(Hash::Ripemd160, b"abc")), ripemd);
    }
}

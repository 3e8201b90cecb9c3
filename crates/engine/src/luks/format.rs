//! New volumes.

use std::array;

use vellum_format::luks::names::{Cipher, Hash, IvGenerator, Mode};
use vellum_format::luks::{
    DIGEST_SIZE_BYTES, KEY_MATERIAL_ALIGNMENT_BYTES, KEY_SLOTS, KeySlot, LuksHeader,
    MAX_DIGEST_ITERATIONS, MAX_ITERATIONS, SALT_SIZE_BYTES, SECTOR_SIZE_BYTES, STRIPES, Suite,
    key_material_sectors, key_place_sectors, payload_start_sectors,
};
use vellum_io::lane::compute;
use zeroize::Zeroizing;

use super::MasterKey;
use super::Passphrase;
use super::cipher::SectorCipher;
use super::hash::{derive, iterations_per_second, random};
use super::split::split;
use crate::qcow2::bad_format;
use crate::{Error, ErrorKind, Result};

/// Iterations that no key slot, and no digest of a master key, gets fewer of where
/// time is given.
const MIN_ITERATIONS: u64 = 1000;
/// The digest of the master key takes this part of the time of a key slot.
const DIGEST_PART: u64 = 8;
const ERANGE: i32 = 34;
const OUT_OF_RANGE: &str = "Numerical result out of range";

/// How long it takes to try a passphrase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IterationTime {
    /// As long on this processor, in milliseconds (`iter-time`).
    Milliseconds(u64),
    /// So many iterations, measuring nothing: for passphrases that nobody guesses. A
    /// thousand are the least that programs make for others.
    Iterations(u32),
}

/// How to encrypt a new volume, with QEMU's defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FormatOptions {
    /// `cipher-alg`
    pub cipher: Cipher,
    /// `cipher-mode`
    pub mode: Mode,
    /// `ivgen-alg`
    pub iv_generator: IvGenerator,
    /// `ivgen-hash-alg`; ESSIV takes SHA-256 where none is given.
    pub iv_hash: Option<Hash>,
    /// `hash-alg`
    pub hash: Hash,
    /// `iter-time`
    pub iteration_time: IterationTime,
}

impl Default for FormatOptions {
    fn default() -> Self {
        FormatOptions {
            cipher: Cipher::Aes256,
            mode: Mode::Xts,
            iv_generator: IvGenerator::Plain64,
            iv_hash: None,
            hash: Hash::Sha256,
            iteration_time: IterationTime::Milliseconds(2000),
        }
    }
}

impl FormatOptions {
    /// The suite that these options mean.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for what does not go together, in QEMU's words.
    pub fn suite(&self) -> Result<Suite> {
        let essiv = self.iv_generator == IvGenerator::Essiv;
        let suite = Suite {
            cipher: self.cipher,
            mode: self.mode,
            iv_generator: self.iv_generator,
            iv_hash: self.iv_hash.or(essiv.then_some(Hash::Sha256)),
            hash: self.hash,
        };
        suite
            .check()
            .map_err(|error| bad_format("create", &error))?;
        Ok(suite)
    }
}

/// Bytes from the start of a new volume's header to its payload: what a header takes
/// with places for all its keys.
///
/// # Errors
/// As [`FormatOptions::suite`].
pub fn header_size_bytes(options: &FormatOptions) -> Result<u64> {
    let key_bytes = options.suite()?.key_bytes() as u32;
    Ok(payload_start_sectors(key_bytes) * SECTOR_SIZE_BYTES)
}

/// A volume that is still to be written.
pub struct NewVolume {
    /// Its header.
    pub header: LuksHeader,
    /// The first bytes of the header's place: header and first key slot. What follows,
    /// up to [`NewVolume::size_bytes`], may hold anything, but must be there.
    pub bytes: Vec<u8>,
    /// What it takes, with places for all its keys.
    pub size_bytes: u64,
}

impl std::fmt::Debug for NewVolume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewVolume")
            .field("header", &self.header)
            .field("size_bytes", &self.size_bytes)
            .finish_non_exhaustive()
    }
}

/// Makes the header of a volume with a new key, and a slot of it for `passphrase`;
/// `detached`: the payload is elsewhere, and starts at its beginning.
///
/// # Errors
/// As [`FormatOptions::suite`], and if the system has no randomness.
pub async fn format(
    options: &FormatOptions,
    passphrase: &Passphrase,
    detached: bool,
) -> Result<NewVolume> {
    let (options, passphrase) = (*options, passphrase.clone());
    compute(move || make(&options, &passphrase, detached)).await
}

fn make(options: &FormatOptions, passphrase: &Passphrase, detached: bool) -> Result<NewVolume> {
    let suite = options.suite()?;
    let (hash, key_bytes) = (suite.hash, suite.key_bytes());
    let mut key = Zeroizing::new(vec![0; key_bytes]);
    random(&mut key)?;
    let mut digest_salt = [0; SALT_SIZE_BYTES];
    random(&mut digest_salt)?;
    let digest_iterations =
        options
            .iteration_time
            .iterations(hash, DIGEST_SIZE_BYTES, DIGEST_PART)?;
    let mut digest = [0; DIGEST_SIZE_BYTES];
    derive(hash, &key, &digest_salt, digest_iterations, &mut digest);
    let mut header = LuksHeader {
        cipher_name: suite.cipher.family().to_owned(),
        cipher_mode: suite.mode_spec(),
        hash_spec: hash.name().to_owned(),
        payload_offset_sectors: match detached {
            true => 0,
            false => payload_start_sectors(key_bytes as u32) as u32,
        },
        key_bytes: key_bytes as u32,
        digest,
        digest_salt,
        digest_iterations,
        uuid: uuid()?,
        slots: empty_slots(key_bytes as u32),
    };
    let key = MasterKey::new(key);
    let (slot, material) = new_slot(
        &suite,
        &header.slots[0],
        &key,
        passphrase,
        options.iteration_time,
    )?;
    header.slots[0] = slot;
    let mut bytes = header
        .encode()
        .map_err(|error| bad_format("create", &error))?;
    bytes.resize(slot.key_offset_bytes() as usize, 0);
    bytes.extend_from_slice(&material);
    Ok(NewVolume {
        header,
        bytes,
        size_bytes: payload_start_sectors(key_bytes as u32) * SECTOR_SIZE_BYTES,
    })
}

impl IterationTime {
    /// How many iterations that is; `part`: in the how manieth part of the time.
    fn iterations(self, hash: Hash, key_bytes: usize, part: u64) -> Result<u32> {
        let refuse = |message| {
            let error = Error::new(ErrorKind::InvalidArgument, "create", message);
            error.with_errno(ERANGE)
        };
        let iterations = match self {
            IterationTime::Iterations(count) => u64::from(count.max(1)),
            IterationTime::Milliseconds(milliseconds) => {
                let rate = iterations_per_second(hash, key_bytes);
                let scaled = rate.checked_mul(milliseconds).ok_or_else(|| {
                    refuse(format!(
                        "PBKDF iterations {rate} too large to scale: {OUT_OF_RANGE}"
                    ))
                })?;
                (scaled / 1000 / part).max(MIN_ITERATIONS)
            }
        };
        // What nobody would open is not made.
        let most = u64::from(match part {
            1 => MAX_ITERATIONS,
            _ => MAX_DIGEST_ITERATIONS,
        });
        match u32::try_from(iterations) {
            Ok(count) if iterations <= most => Ok(count),
            _ => Err(refuse(format!(
                "PBKDF iterations {iterations} larger than {most}: {OUT_OF_RANGE}"
            ))),
        }
    }
}

/// A slot, and what belongs to its place, that has `passphrase` lead to `key`.
pub(super) fn new_slot(
    suite: &Suite,
    place: &KeySlot,
    key: &MasterKey,
    passphrase: &Passphrase,
    iteration_time: IterationTime,
) -> Result<(KeySlot, Vec<u8>)> {
    let key_bytes = suite.key_bytes();
    let mut slot = KeySlot {
        active: true,
        iterations: iteration_time.iterations(suite.hash, key_bytes, 1)?,
        stripes: STRIPES,
        ..*place
    };
    random(&mut slot.salt)?;
    let mut slot_key = Zeroizing::new(vec![0; key_bytes]);
    derive(
        suite.hash,
        passphrase.bytes(),
        &slot.salt,
        slot.iterations,
        &mut slot_key,
    );
    // As long as it will be: what grows would leave the pieces behind, in the clear.
    let sectors = key_material_sectors(key_bytes as u32, STRIPES);
    let mut material = vec![0; (sectors * SECTOR_SIZE_BYTES) as usize];
    let pieces = split(suite.hash, key.bytes(), STRIPES)?;
    let cipher = SectorCipher::new(suite, &slot_key)?;
    material[..pieces.len()].copy_from_slice(&pieces);
    cipher.encrypt(0, &mut material);
    Ok((slot, material))
}

fn empty_slots(key_bytes: u32) -> [KeySlot; KEY_SLOTS] {
    let first = KEY_MATERIAL_ALIGNMENT_BYTES / SECTOR_SIZE_BYTES;
    array::from_fn(|index| KeySlot {
        active: false,
        iterations: 0,
        salt: [0; SALT_SIZE_BYTES],
        key_offset_sectors: (first + index as u64 * key_place_sectors(key_bytes)) as u32,
        stripes: STRIPES,
    })
}

/// A random UUID (version 4) as text.
fn uuid() -> Result<String> {
    let mut bytes = [0; 16];
    random(&mut bytes)?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let mut text = String::with_capacity(36);
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    Ok(text)
}

//! The header of a LUKS1 volume: 592 bytes, all numbers big-endian.
//!
//! It stands at the start of a `luks` file, or where a qcow2 image's encryption
//! header extension points. Behind it lie eight places for key material; what is
//! encrypted (the payload) follows in a file of its own kind, and is the guest
//! clusters in a qcow2 image.
//!
//! | offset | bytes | field |
//! | --- | --- | --- |
//! | 0 | 6 | magic `LUKS\xba\xbe` |
//! | 6 | 2 | version, 1 |
//! | 8 | 32 | cipher name |
//! | 40 | 32 | mode of the cipher and IV generator: `MODE-IVGEN[:HASH]` |
//! | 72 | 32 | hash of the key derivation |
//! | 104 | 4 | start of the payload, in sectors of 512 bytes |
//! | 108 | 4 | bytes of the master key |
//! | 112 | 20 | digest of the master key |
//! | 132 | 32 | salt of that digest |
//! | 164 | 4 | iterations of that digest |
//! | 168 | 40 | UUID, as text |
//! | 208 | 8 × 48 | key slots |

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::bytes;
use crate::error::{FormatError, FormatErrorKind, Result};

pub mod names;

use names::{Cipher, Hash, IvGenerator, Mode};

/// Bytes of the header.
pub const HEADER_SIZE_BYTES: usize = 592;
/// What all offsets in the header count, and what is encrypted as a unit.
pub const SECTOR_SIZE_BYTES: u64 = 512;
/// Key slots of a volume.
pub const KEY_SLOTS: usize = 8;
/// Into how many pieces a master key is split in its slot.
pub const STRIPES: u32 = 4000;
/// Where the first place for key material starts, and to what places are aligned.
pub const KEY_MATERIAL_ALIGNMENT_BYTES: u64 = 4096;
/// Bytes of the digest of the master key.
pub const DIGEST_SIZE_BYTES: usize = 20;
/// Bytes of a salt.
pub const SALT_SIZE_BYTES: usize = 32;
/// The most iterations of PBKDF2 that a key slot may ask for. A fast processor makes as many in half
/// a minute, which is 8 times what volumes are made with at most unless somebody asks for more, and
/// a slow one in some minutes: so long does a header, whoever has made it, have a program work.
pub const MAX_ITERATIONS: u32 = 1 << 27;
/// The most iterations that the digest of the master key may ask for: programs give it an eighth of
/// a key slot's.
pub const MAX_DIGEST_ITERATIONS: u32 = MAX_ITERATIONS / 8;
/// Where the key slots start in the header.
pub const SLOTS_OFFSET_BYTES: usize = 208;
/// Bytes of a key slot.
pub const SLOT_SIZE_BYTES: usize = 48;

const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
const VERSION: u16 = 1;
const NAME_SIZE_BYTES: usize = 32;
const UUID_SIZE_BYTES: usize = 40;
const SLOT_ACTIVE: u32 = 0x00ac_71f3;
const SLOT_INACTIVE: u32 = 0x0000_dead;

const CIPHER_NAME: usize = 8;
const CIPHER_MODE: usize = 40;
const HASH_SPEC: usize = 72;
const PAYLOAD_OFFSET: usize = 104;
const KEY_BYTES: usize = 108;
const DIGEST: usize = 112;
const DIGEST_SALT: usize = 132;
const DIGEST_ITERATIONS: usize = 164;
const UUID: usize = 168;

/// One place for a copy of the master key, encrypted with a passphrase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeySlot {
    /// Whether it holds a key.
    pub active: bool,
    /// Iterations of the key derivation from the passphrase.
    pub iterations: u32,
    /// Salt of that derivation.
    pub salt: [u8; SALT_SIZE_BYTES],
    /// Where the key material starts, in sectors from the start of the header.
    pub key_offset_sectors: u32,
    /// Into how many pieces the key is split; always [`STRIPES`].
    pub stripes: u32,
}

impl KeySlot {
    /// Where the key material starts, in bytes from the start of the header.
    pub fn key_offset_bytes(&self) -> u64 {
        u64::from(self.key_offset_sectors) * SECTOR_SIZE_BYTES
    }

    /// The slot's bytes in the header.
    pub fn encode(&self) -> [u8; SLOT_SIZE_BYTES] {
        let active = if self.active {
            SLOT_ACTIVE
        } else {
            SLOT_INACTIVE
        };
        let mut bytes = [0; SLOT_SIZE_BYTES];
        bytes[..4].copy_from_slice(&active.to_be_bytes());
        bytes[4..8].copy_from_slice(&self.iterations.to_be_bytes());
        bytes[8..40].copy_from_slice(&self.salt);
        bytes[40..44].copy_from_slice(&self.key_offset_sectors.to_be_bytes());
        bytes[44..].copy_from_slice(&self.stripes.to_be_bytes());
        bytes
    }
}

/// A LUKS1 header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LuksHeader {
    /// Name of the cipher's family: `aes`.
    pub cipher_name: String,
    /// Mode and IV generator: `xts-plain64`.
    pub cipher_mode: String,
    /// Hash of the key derivation.
    pub hash_spec: String,
    /// Start of the payload in sectors; 0 where the header stands apart from it.
    pub payload_offset_sectors: u32,
    /// Bytes of the master key.
    pub key_bytes: u32,
    /// Digest of the master key.
    pub digest: [u8; DIGEST_SIZE_BYTES],
    /// Salt of the digest.
    pub digest_salt: [u8; SALT_SIZE_BYTES],
    /// Iterations of the digest.
    pub digest_iterations: u32,
    /// UUID as text.
    pub uuid: String,
    /// The key slots.
    pub slots: [KeySlot; KEY_SLOTS],
}

/// How a volume is encrypted: what the names in its header mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Suite {
    /// The cipher with its key's length.
    pub cipher: Cipher,
    /// How sectors are made of its blocks.
    pub mode: Mode,
    /// Where a sector's IV comes from.
    pub iv_generator: IvGenerator,
    /// The hash of the IV generator, where the header names one.
    pub iv_hash: Option<Hash>,
    /// The hash of the key derivation.
    pub hash: Hash,
}

impl Suite {
    /// Bytes of the master key.
    pub const fn key_bytes(&self) -> usize {
        match self.mode {
            // One key for the data, one for the tweaks.
            Mode::Xts => 2 * self.cipher.key_bytes(),
            _ => self.cipher.key_bytes(),
        }
    }

    /// The header's word for mode and IV generator.
    pub fn mode_spec(&self) -> String {
        let (mode, generator) = (self.mode.name(), self.iv_generator.name());
        match self.iv_hash {
            Some(hash) => format!("{mode}-{generator}:{}", hash.name()),
            None => format!("{mode}-{generator}"),
        }
    }
}

fn fault(field: &'static str, value: u64, message: impl Into<String>) -> FormatError {
    FormatError::new(
        FormatErrorKind::Invalid,
        "LUKS header",
        field,
        value,
        message.into(),
    )
}

fn unsupported(field: &'static str, message: impl Into<String>) -> FormatError {
    FormatError::new(
        FormatErrorKind::Unsupported,
        "LUKS header",
        field,
        0,
        message.into(),
    )
}

/// Whether `start` begins like a LUKS1 volume.
pub fn is_luks(start: &[u8]) -> bool {
    start.starts_with(&MAGIC) && bytes::be16(start, MAGIC.len()) == Some(VERSION)
}

/// Sectors that the key material of a slot takes.
pub const fn key_material_sectors(key_bytes: u32, stripes: u32) -> u64 {
    (key_bytes as u64 * stripes as u64).div_ceil(SECTOR_SIZE_BYTES)
}

/// Sectors from the start of one place for key material to the next.
pub const fn key_place_sectors(key_bytes: u32) -> u64 {
    let unit = KEY_MATERIAL_ALIGNMENT_BYTES / SECTOR_SIZE_BYTES;
    key_material_sectors(key_bytes, STRIPES).next_multiple_of(unit)
}

/// Where the payload of a new volume starts, in sectors: behind all key material.
pub const fn payload_start_sectors(key_bytes: u32) -> u64 {
    KEY_MATERIAL_ALIGNMENT_BYTES / SECTOR_SIZE_BYTES
        + KEY_SLOTS as u64 * key_place_sectors(key_bytes)
}

impl LuksHeader {
    /// Decodes and checks a header; `detached`: it stands apart from the payload.
    ///
    /// # Errors
    /// In QEMU's words, with the first objection in QEMU's order.
    pub fn decode(data: &[u8], detached: bool) -> Result<Self> {
        let Some(data) = data.first_chunk::<HEADER_SIZE_BYTES>() else {
            return Err(FormatError::new(
                FormatErrorKind::Truncated,
                "LUKS header",
                "length",
                data.len() as u64,
                "Volume is not in LUKS format",
            ));
        };
        if !data.starts_with(&MAGIC) {
            return Err(fault("magic", 0, "Volume is not in LUKS format"));
        }
        let version = number16(data, 6);
        if version != VERSION {
            return Err(unsupported(
                "version",
                format!("LUKS version {version} is not supported"),
            ));
        }
        let header = LuksHeader {
            cipher_name: name(data, CIPHER_NAME, "cipher name")?,
            cipher_mode: name(data, CIPHER_MODE, "cipher mode")?,
            hash_spec: name(data, HASH_SPEC, "hash spec")?,
            payload_offset_sectors: number(data, PAYLOAD_OFFSET),
            key_bytes: number(data, KEY_BYTES),
            digest: array(data, DIGEST),
            digest_salt: array(data, DIGEST_SALT),
            digest_iterations: number(data, DIGEST_ITERATIONS),
            uuid: text(&data[UUID..UUID + UUID_SIZE_BYTES]),
            slots: decode_slots(data)?,
        };
        header.check(detached)?;
        Ok(header)
    }

    fn check(&self, detached: bool) -> Result<()> {
        let first = KEY_MATERIAL_ALIGNMENT_BYTES / SECTOR_SIZE_BYTES;
        let payload = u64::from(self.payload_offset_sectors);
        if !detached && payload < first {
            let message = "LUKS payload is overlapping with the header";
            return Err(fault("payload_offset", payload, message));
        }
        if self.digest_iterations == 0 {
            let message = "LUKS key iteration count is zero";
            return Err(fault("mk_digest_iterations", 0, message));
        }
        let count = self.digest_iterations;
        if count > MAX_DIGEST_ITERATIONS {
            let message =
                format!("LUKS key iteration count {count} is larger than {MAX_DIGEST_ITERATIONS}");
            return Err(fault("mk_digest_iterations", count.into(), message));
        }
        for (index, slot) in self.slots.iter().enumerate() {
            self.check_slot(index, slot, first, (!detached).then_some(payload))?;
        }
        Ok(())
    }

    fn check_slot(
        &self,
        index: usize,
        slot: &KeySlot,
        first: u64,
        payload: Option<u64>,
    ) -> Result<()> {
        if slot.stripes != STRIPES {
            let message = format!(
                "Keyslot {index} is corrupted (stripes {} != {STRIPES})",
                slot.stripes
            );
            return Err(fault("stripes", slot.stripes.into(), message));
        }
        let length = key_material_sectors(self.key_bytes, STRIPES);
        let start = u64::from(slot.key_offset_sectors);
        if start < first {
            let message = format!("Keyslot {index} is overlapping with the LUKS header");
            return Err(fault("key_offset", start, message));
        }
        if slot.active && slot.iterations == 0 {
            let message = format!("Keyslot {index} iteration count is zero");
            return Err(fault("iterations", 0, message));
        }
        if slot.active && slot.iterations > MAX_ITERATIONS {
            let count = slot.iterations;
            let message =
                format!("Keyslot {index} iteration count {count} is larger than {MAX_ITERATIONS}");
            return Err(fault("iterations", count.into(), message));
        }
        if payload.is_some_and(|payload| start + length > payload) {
            let message = format!("Keyslot {index} is overlapping with the encrypted payload");
            return Err(fault("key_offset", start, message));
        }
        for (other, later) in self.slots.iter().enumerate().skip(index + 1) {
            let second = u64::from(later.key_offset_sectors);
            if start < second + length && second < start + length {
                let message = format!("Keyslots {index} and {other} are overlapping in the header");
                return Err(fault("key_offset", start, message));
            }
        }
        Ok(())
    }

    /// What the names in the header mean.
    ///
    /// # Errors
    /// In QEMU's words, for names that are not known or do not go together.
    pub fn suite(&self) -> Result<Suite> {
        let spec = self.cipher_mode.as_str();
        let Some((mode, generator)) = spec.split_once('-') else {
            let message = format!("Unexpected cipher mode string format '{spec}'");
            return Err(fault("cipher_mode", 0, message));
        };
        let (generator, iv_hash) = match generator.split_once(':') {
            Some((generator, hash)) => (generator, Some(hash)),
            None => (generator, None),
        };
        let unknown =
            |what: &str, name: &str| unsupported("names", format!("{what} '{name}' not supported"));
        let hash = |name: &str| Hash::named(name).ok_or_else(|| unknown("Hash algorithm", name));
        let iv_hash = iv_hash.map(hash).transpose()?;
        let mode = Mode::named(mode).ok_or_else(|| unknown("Cipher mode", mode))?;
        let key_bytes = match mode {
            Mode::Xts if !self.key_bytes.is_multiple_of(2) => {
                let message = format!(
                    "XTS cipher key length should be a multiple of 2, but it is {}",
                    self.key_bytes
                );
                return Err(fault("key_bytes", self.key_bytes.into(), message));
            }
            Mode::Xts => self.key_bytes / 2,
            _ => self.key_bytes,
        };
        let cipher = Cipher::of_family(&self.cipher_name, key_bytes as usize).ok_or_else(|| {
            let (name, bytes) = (&self.cipher_name, key_bytes);
            let message = format!("Algorithm '{name}' with key size {bytes} bytes not supported");
            unsupported("cipher_name", message)
        })?;
        let suite = Suite {
            cipher,
            mode,
            hash: hash(&self.hash_spec)?,
            iv_generator: IvGenerator::named(generator)
                .ok_or_else(|| unknown("IV generator", generator))?,
            iv_hash,
        };
        suite.check()?;
        Ok(suite)
    }

    /// Bytes of the key material of each slot.
    pub fn key_place_bytes(&self) -> u64 {
        key_material_sectors(self.key_bytes, STRIPES) * SECTOR_SIZE_BYTES
    }

    /// The header's bytes.
    ///
    /// # Errors
    /// If a name is too long for its place.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut data = Vec::with_capacity(HEADER_SIZE_BYTES);
        data.extend(MAGIC);
        data.extend(VERSION.to_be_bytes());
        put_name(&mut data, &self.cipher_name, NAME_SIZE_BYTES, "Cipher name")?;
        put_name(&mut data, &self.cipher_mode, NAME_SIZE_BYTES, "Cipher mode")?;
        put_name(&mut data, &self.hash_spec, NAME_SIZE_BYTES, "Hash name")?;
        data.extend(self.payload_offset_sectors.to_be_bytes());
        data.extend(self.key_bytes.to_be_bytes());
        data.extend(self.digest);
        data.extend(self.digest_salt);
        data.extend(self.digest_iterations.to_be_bytes());
        put_name(&mut data, &self.uuid, UUID_SIZE_BYTES + 1, "UUID")?;
        data.truncate(UUID + UUID_SIZE_BYTES);
        for slot in &self.slots {
            data.extend(slot.encode());
        }
        Ok(data)
    }
}

impl Suite {
    /// Checks that cipher, mode and IV generator go together.
    ///
    /// # Errors
    /// In QEMU's words.
    pub fn check(&self) -> Result<()> {
        if self.mode == Mode::Xts && self.cipher.block_bytes() != 16 {
            return Err(unsupported("cipher_mode", "Unsupported cipher mode xts"));
        }
        if self.iv_generator == IvGenerator::Essiv {
            let hash = self.iv_hash.ok_or_else(|| {
                fault("cipher_mode", 0, "Missing IV generator hash specification")
            })?;
            self.essiv_cipher(hash)?;
        }
        Ok(())
    }

    /// The cipher that makes IVs of sector numbers, keyed with a hash of the master key.
    ///
    /// # Errors
    /// If none has keys as long as the hash.
    pub fn essiv_cipher(&self, hash: Hash) -> Result<Cipher> {
        let Some(family) = self.cipher.essiv_family() else {
            let message = format!("Cipher {} not supported with essiv", self.cipher.name());
            return Err(unsupported("cipher_mode", message));
        };
        let bytes = hash.digest_bytes();
        Cipher::of_family(self.cipher.family(), bytes).ok_or_else(|| {
            let message = format!("No {family} cipher with key size {bytes} available");
            unsupported("cipher_mode", message)
        })
    }
}

fn decode_slots(data: &[u8; HEADER_SIZE_BYTES]) -> Result<[KeySlot; KEY_SLOTS]> {
    let empty = KeySlot {
        active: false,
        iterations: 0,
        salt: [0; SALT_SIZE_BYTES],
        key_offset_sectors: 0,
        stripes: 0,
    };
    let mut slots = [empty; KEY_SLOTS];
    for (index, slot) in slots.iter_mut().enumerate() {
        let at = SLOTS_OFFSET_BYTES + index * SLOT_SIZE_BYTES;
        let state = number(data, at);
        *slot = KeySlot {
            active: match state {
                SLOT_ACTIVE => true,
                SLOT_INACTIVE => false,
                _ => {
                    let message = format!("Keyslot {index} state (active/disable) is corrupted");
                    return Err(fault("active", state.into(), message));
                }
            },
            iterations: number(data, at + 4),
            salt: array(data, at + 8),
            key_offset_sectors: number(data, at + 40),
            stripes: number(data, at + 44),
        };
    }
    Ok(slots)
}

fn number(data: &[u8; HEADER_SIZE_BYTES], at: usize) -> u32 {
    bytes::be32(data, at).unwrap_or(0)
}

fn number16(data: &[u8; HEADER_SIZE_BYTES], at: usize) -> u16 {
    bytes::be16(data, at).unwrap_or(0)
}

fn array<const N: usize>(data: &[u8; HEADER_SIZE_BYTES], at: usize) -> [u8; N] {
    bytes::array(data, at).unwrap_or([0; N])
}

/// A name that must end inside its place.
fn name(data: &[u8; HEADER_SIZE_BYTES], at: usize, what: &str) -> Result<String> {
    let place = &data[at..at + NAME_SIZE_BYTES];
    if !place.contains(&0) {
        let message = format!("LUKS header {what} is not NUL terminated");
        return Err(fault("names", 0, message));
    }
    Ok(text(place))
}

/// The text before the first NUL; bytes that are no text show as `?`.
fn text(place: &[u8]) -> String {
    let printable = |&byte: &u8| match byte {
        0x20..=0x7e => byte as char,
        _ => '?',
    };
    bytes::until_nul(place).iter().map(printable).collect()
}

fn put_name(data: &mut Vec<u8>, name: &str, size: usize, what: &str) -> Result<()> {
    if name.len() >= size {
        let message = format!("{what} '{name}' is too long for LUKS header");
        return Err(FormatError::new(
            FormatErrorKind::NoSpace,
            "LUKS header",
            "names",
            name.len() as u64,
            message,
        ));
    }
    let end = data.len() + size;
    data.extend(name.bytes());
    data.resize(end, 0);
    Ok(())
}

#[cfg(test)]
mod tests;

//! From a volume's header and a passphrase to the key of its sectors.

use std::fmt;
use std::sync::Arc;

use vellum_format::luks::{
    DIGEST_SIZE_BYTES, HEADER_SIZE_BYTES, KeySlot, LuksHeader, SECTOR_SIZE_BYTES, Suite,
    key_material_sectors,
};
use vellum_io::lane::compute;
use zeroize::Zeroizing;

use super::Passphrase;
use super::cipher::SectorCipher;
use super::hash::derive;
use super::split::merge;
use crate::qcow2::bad_format;
use crate::qcow2::read_bytes;
use crate::{Error, ErrorKind, Result, Storage};

const EACCES: i32 = 13;

/// The key that a volume's sectors are encrypted with. Copies share the bytes, which
/// are wiped with the last of them.
#[derive(Clone)]
pub struct MasterKey(Arc<Zeroizing<Vec<u8>>>);

impl MasterKey {
    pub(super) fn new(bytes: Zeroizing<Vec<u8>>) -> Self {
        MasterKey(Arc::new(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MasterKey")
    }
}

fn wrong_passphrase() -> Error {
    let message = "Invalid password, cannot unlock any keyslot";
    Error::new(ErrorKind::Denied, "unlock", message).with_errno(EACCES)
}

/// Reads and checks the header that stands at `at_bytes` of `storage`; `detached`:
/// what it encrypts is elsewhere. The key material may lie anywhere behind it.
///
/// # Errors
/// If there is no LUKS1 header, or one that cannot be supported.
pub async fn read_header(
    storage: &Arc<dyn Storage>,
    at_bytes: u64,
    detached: bool,
) -> Result<LuksHeader> {
    let bytes = read_bytes(storage, at_bytes, HEADER_SIZE_BYTES as u64).await?;
    let header =
        LuksHeader::decode(&bytes, detached).and_then(|header| header.suite().map(|_| header));
    header.map_err(|error| bad_format("open", &error).target(storage.name()))
}

/// Finds the master key of the volume whose header stands at `at_bytes`. That takes
/// the time that the header asks for, in a thread of its own.
///
/// # Errors
/// [`ErrorKind::Denied`] if the passphrase fits no key slot.
pub async fn unlock(
    storage: &Arc<dyn Storage>,
    at_bytes: u64,
    header: &LuksHeader,
    passphrase: &Passphrase,
) -> Result<MasterKey> {
    for slot in &header.slots {
        if let Some(key) = try_slot(storage, at_bytes, header, slot, passphrase).await? {
            return Ok(key);
        }
    }
    Err(wrong_passphrase().target(storage.name()))
}

/// The master key, if the slot is active and the passphrase is its.
pub(super) async fn try_slot(
    storage: &Arc<dyn Storage>,
    at_bytes: u64,
    header: &LuksHeader,
    slot: &KeySlot,
    passphrase: &Passphrase,
) -> Result<Option<MasterKey>> {
    if !slot.active {
        return Ok(None);
    }
    let suite = header.suite().map_err(|error| bad_format("open", &error))?;
    let len_bytes = key_material_sectors(header.key_bytes, slot.stripes) * SECTOR_SIZE_BYTES;
    let material = read_bytes(storage, at_bytes + slot.key_offset_bytes(), len_bytes).await?;
    let check = KeyCheck::of(header, suite);
    let (slot, passphrase) = (*slot, passphrase.clone());
    compute(move || check.open(&slot, &passphrase, &material)).await
}

/// What it takes to know whether a key is the master key.
struct KeyCheck {
    suite: Suite,
    digest: [u8; DIGEST_SIZE_BYTES],
    salt: [u8; 32],
    iterations: u32,
}

impl KeyCheck {
    fn of(header: &LuksHeader, suite: Suite) -> Self {
        KeyCheck {
            suite,
            digest: header.digest,
            salt: header.digest_salt,
            iterations: header.digest_iterations,
        }
    }

    fn open(
        &self,
        slot: &KeySlot,
        passphrase: &Passphrase,
        material: &[u8],
    ) -> Result<Option<MasterKey>> {
        let (hash, key_bytes) = (self.suite.hash, self.suite.key_bytes());
        let mut slot_key = Zeroizing::new(vec![0; key_bytes]);
        derive(
            hash,
            passphrase.bytes(),
            &slot.salt,
            slot.iterations,
            &mut slot_key,
        );
        let mut pieces = Zeroizing::new(material.to_vec());
        SectorCipher::new(&self.suite, &slot_key)?.decrypt(0, &mut pieces);
        let key = merge(
            hash,
            &pieces[..key_bytes * slot.stripes as usize],
            key_bytes,
        );
        let mut digest = [0; DIGEST_SIZE_BYTES];
        derive(hash, &key, &self.salt, self.iterations, &mut digest);
        Ok((digest == self.digest).then(|| MasterKey::new(key)))
    }
}

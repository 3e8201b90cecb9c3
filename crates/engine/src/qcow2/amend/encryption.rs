//! Key slots of an encrypted image: `encrypt.*`.

use vellum_format::Header;
use vellum_format::crypto::CryptMethod;
use vellum_storage::{ErrorKind, Result};

use super::{Work, refuse};

/// A change of key slots, with QEMU's names and meanings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeySlotChange {
    /// `encrypt.state`: `true` for `active`, to set a slot; `false` for `inactive`,
    /// to erase some.
    pub active: Option<bool>,
    /// `encrypt.new-secret`: the id of the secret to set.
    pub new_secret: Option<String>,
    /// `encrypt.old-secret`: the id of the secret whose slots are meant.
    pub old_secret: Option<String>,
    /// `encrypt.keyslot`: one slot.
    pub key_slot: Option<u64>,
    /// `encrypt.iter-time`: milliseconds to spend in PBKDF.
    pub iteration_time_ms: Option<u64>,
}

/// Whether an image has key slots.
pub(super) fn check(header: &Header) -> Result<()> {
    match header.crypt_method {
        CryptMethod::None => {
            let message = "Can't amend encryption options - encryption not present";
            Err(refuse(ErrorKind::InvalidArgument, message))
        }
        CryptMethod::Luks => Ok(()),
        _ => {
            let message = "Only LUKS encryption options can be amended";
            Err(refuse(ErrorKind::Unsupported, message))
        }
    }
}

/// Changes the key slots of an image that has some.
pub(super) async fn change(work: &Work, change: &KeySlotChange, force: bool) -> Result<()> {
    let message = format!("{work:?} (force: {force}): {change:?} is not part of this version");
    Err(refuse(ErrorKind::Unsupported, message))
}

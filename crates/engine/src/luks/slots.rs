//! Adding and erasing copies of the master key: what `amend` does with key slots.
//!
//! Invariants:
//! - A slot becomes active in one write of one sector, behind a barrier: its key
//!   material, salt and iterations are durable before.
//! - A slot is inactive on disk before its key material is overwritten.
//! - A crash leaves every passphrase that was to stay, and the new one or not.
//! - A change that was begun runs to its end (rule 10): what is erased is overwritten, too.

use std::sync::Arc;

use vellum_format::luks::{
    KEY_SLOTS, KeySlot, LuksHeader, SALT_SIZE_BYTES, SECTOR_SIZE_BYTES, SLOT_SIZE_BYTES,
    SLOTS_OFFSET_BYTES, key_material_sectors,
};
use vellum_io::lane::compute;
use vellum_io::spawn_to_completion;
use vellum_storage::WriteFlags;

use super::Passphrase;
use super::format::{IterationTime, new_slot};
use super::hash::random;
use super::unlock;
use super::volume::try_slot;
use crate::qcow2::bad_format;
use crate::{Buffer, Buffers, Error, ErrorKind, Result, Storage};

/// How often the key material of an erased slot is overwritten.
const ERASE_PASSES: usize = 40;

/// A change of the key slots, with the meaning and the refusals of QEMU's
/// `amend -o state=...`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyChange {
    /// `state=active`: another passphrase that unlocks the volume.
    Add {
        /// The slot to use; the first free one where none is given.
        slot: Option<u64>,
        /// The new passphrase.
        new: Passphrase,
        /// What unlocks the volume for that; the passphrase it was opened with where none is
        /// given.
        known: Option<Passphrase>,
        /// How long it takes to try it.
        iteration_time: IterationTime,
        /// Replace what `slot` holds, even if it is active: a crash then may lose what
        /// was there before the new passphrase is.
        force: bool,
    },
    /// `state=inactive`: takes passphrases away.
    Erase {
        /// The slot to erase; where none is given, all slots of `old`.
        slot: Option<u64>,
        /// What these slots must be unlocked by.
        old: Option<Passphrase>,
        /// Erase even the last slot: all data is lost for ever.
        force: bool,
    },
}

fn refuse<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::new(
        ErrorKind::InvalidArgument,
        "amend",
        message.into(),
    ))
}

/// Changes the key slots of the volume whose header stands at `at_bytes` of
/// `storage`, and returns the header as it is then; `known` is a passphrase that
/// unlocks the volume before.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] in QEMU's words for changes that cannot be, or that
/// would lose all data; [`ErrorKind::Denied`] if a passphrase is wrong.
pub async fn change_keys(
    storage: &Arc<dyn Storage>,
    at_bytes: u64,
    header: LuksHeader,
    known: &Passphrase,
    change: KeyChange,
) -> Result<LuksHeader> {
    let (storage, known) = (storage.clone(), known.clone());
    spawn_to_completion(async move { run(&storage, at_bytes, header, &known, change).await }).await
}

async fn run(
    storage: &Arc<dyn Storage>,
    at_bytes: u64,
    mut header: LuksHeader,
    known: &Passphrase,
    change: KeyChange,
) -> Result<LuksHeader> {
    let mut slots = Slots {
        storage,
        at_bytes,
        header: &mut header,
    };
    match change {
        KeyChange::Add {
            slot,
            new,
            known: given,
            iteration_time,
            force,
        } => {
            let known = given.as_ref().unwrap_or(known);
            let index = slots.index_to_add(slot, force)?;
            slots.add(index, known, new, iteration_time).await?;
        }
        KeyChange::Erase { slot, old, force } => slots.erase(slot, old, force).await?,
    }
    Ok(header)
}

struct Slots<'a> {
    storage: &'a Arc<dyn Storage>,
    at_bytes: u64,
    header: &'a mut LuksHeader,
}

fn checked(slot: u64) -> Result<usize> {
    match usize::try_from(slot) {
        Ok(index) if index < KEY_SLOTS => Ok(index),
        _ => refuse(format!(
            "Invalid keyslot {slot} specified, must be between 0 and {}",
            KEY_SLOTS - 1
        )),
    }
}

impl Slots<'_> {
    /// The slot to which a passphrase is added.
    fn index_to_add(&self, slot: Option<u64>, force: bool) -> Result<usize> {
        match slot.map(checked).transpose()? {
            Some(index) if self.header.slots[index].active && !force => refuse(format!(
                "Refusing to overwrite active keyslot {index} - please erase it first"
            )),
            Some(index) => Ok(index),
            None => match self.header.slots.iter().position(|slot| !slot.active) {
                Some(index) => Ok(index),
                None => refuse("Can't add a keyslot - all keyslots are in use"),
            },
        }
    }

    async fn add(
        &mut self,
        index: usize,
        known: &Passphrase,
        new: Passphrase,
        iteration_time: IterationTime,
    ) -> Result<()> {
        let key = unlock(self.storage, self.at_bytes, self.header, known).await?;
        let suite = self
            .header
            .suite()
            .map_err(|error| bad_format("amend", &error))?;
        let place = self.header.slots[index];
        let made = compute(move || new_slot(&suite, &place, &key, &new, iteration_time));
        let (slot, material) = made.await?;
        if self.header.slots[index].active {
            self.erase_slot(index).await?;
        }
        let material_at = self.at_bytes + slot.key_offset_bytes();
        self.write(material_at, &material).await?;
        let quiet = KeySlot {
            active: false,
            ..slot
        };
        self.write_slot(index, &quiet).await?;
        // Only the first word differs, and it lies in one sector.
        self.write_slot(index, &slot).await
    }

    async fn erase(
        &mut self,
        slot: Option<u64>,
        old: Option<Passphrase>,
        force: bool,
    ) -> Result<()> {
        let active = self.header.slots.iter().filter(|slot| slot.active).count();
        let mut erased = Vec::new();
        match (slot.map(checked).transpose()?, old) {
            (Some(index), old) => {
                if let Some(old) = old
                    && !self.is_unlocked_by(index, &old).await?
                {
                    return refuse(format!(
                        "Given keyslot {index} doesn't contain the given old password for erase \
                         operation"
                    ));
                }
                if !force && !self.header.slots[index].active {
                    return refuse(format!(
                        "Given keyslot {index} is already erased (inactive) "
                    ));
                }
                if !force && active == 1 {
                    return refuse(format!(
                        "Attempt to erase the only active keyslot {index} which will erase all \
                         the data in the image irreversibly - refusing operation"
                    ));
                }
                erased.push(index);
            }
            (None, Some(old)) => {
                for index in 0..KEY_SLOTS {
                    if self.is_unlocked_by(index, &old).await? {
                        erased.push(index);
                    }
                }
                if erased.is_empty() {
                    return refuse("No keyslots match given (old) password for erase operation");
                }
                if !force && erased.len() == active {
                    return refuse(
                        "All the active keyslots match the (old) password that was given and \
                         erasing them will erase all the data in the image irreversibly - \
                         refusing operation",
                    );
                }
            }
            (None, None) => {
                return refuse(
                    "To erase keyslot(s), either explicit keyslot index or the password \
                     currently contained in them must be given",
                );
            }
        }
        for index in erased {
            self.erase_slot(index).await?;
        }
        Ok(())
    }

    async fn is_unlocked_by(&self, index: usize, old: &Passphrase) -> Result<bool> {
        let slot = &self.header.slots[index];
        let key = try_slot(self.storage, self.at_bytes, self.header, slot, old).await?;
        Ok(key.is_some())
    }

    async fn erase_slot(&mut self, index: usize) -> Result<()> {
        let empty = KeySlot {
            active: false,
            iterations: 0,
            salt: [0; SALT_SIZE_BYTES],
            ..self.header.slots[index]
        };
        self.write_slot(index, &empty).await?;
        let sectors = key_material_sectors(self.header.key_bytes, empty.stripes);
        let mut garbage = vec![0; (sectors * SECTOR_SIZE_BYTES) as usize];
        let material_at = self.at_bytes + empty.key_offset_bytes();
        for _ in 0..ERASE_PASSES {
            random(&mut garbage)?;
            self.write(material_at, &garbage).await?;
        }
        Ok(())
    }

    /// Writes a slot of the header, and waits until it is durable.
    async fn write_slot(&mut self, index: usize, slot: &KeySlot) -> Result<()> {
        let at = self.at_bytes + (SLOTS_OFFSET_BYTES + index * SLOT_SIZE_BYTES) as u64;
        if self.header.slots[index].active != slot.active {
            // The state by itself, since a slot may lie across two sectors.
            self.write(at, &slot.encode()[..4]).await?;
        }
        self.write(at, &slot.encode()).await?;
        self.header.slots[index] = *slot;
        Ok(())
    }

    async fn write(&self, at_bytes: u64, bytes: &[u8]) -> Result<()> {
        let buffers = Buffers::from_iter([Buffer::copy_of(bytes)]);
        self.storage
            .write(at_bytes, buffers, WriteFlags::default())
            .await?;
        self.storage.flush().await
    }
}

//! Directories: records one after the other in each sector of 2048 bytes, and zeroes behind the
//! last one in it.
//!
//! A name that comes next is told by the place of its record, in bytes from the start of the
//! directory.

use super::record::{RECORD_BYTES_MAX, Record};
use super::system_use::SystemUse;
use super::{Iso, Names, SECTIONS_MAX, SECTOR_BYTES, names};
use crate::error::{Error, Result};
use crate::file_system::{Entry, Id, Kind, is_sound_name};
use crate::lookup::{Key, Named};

/// Of longer directories the rest is not looked at: they would keep a reader busy for hours.
const DIRECTORY_BYTES_MAX: u64 = 256 << 20;

/// Takes an entry; `false`: it wants no more.
type Take<'a> = &'a mut dyn FnMut(&Entry<'_>) -> bool;

/// Finds a name. Those of Joliet are the same in large and small letters, if there is none that is
/// just so.
pub(super) fn lookup(iso: &Iso, directory: Id, name: &[u8]) -> Result<Option<Id>> {
    if !is_sound_name(name) {
        return Ok(None);
    }
    let folded = folded(iso, name);
    let wanted = keys(name, folded.as_deref());
    iso.lookups.find(directory, &wanted, &|from, take| {
        list(iso, directory, from, &mut |entry| {
            let folded = self::folded(iso, entry.name);
            take(&Named::new(entry, &keys(entry.name, folded.as_deref())))
        })
    })
}

/// A name in small letters, where these do as well.
fn folded(iso: &Iso, name: &[u8]) -> Option<String> {
    match iso.names {
        Names::Plain { .. } => None,
        Names::Joliet => std::str::from_utf8(name).ok().map(str::to_lowercase),
    }
}

fn keys<'a>(name: &'a [u8], folded: Option<&'a str>) -> Vec<Key<'a>> {
    let folded = folded.map(Key::Folded);
    std::iter::once(Key::Exact(name)).chain(folded).collect()
}

/// Gives names to `take`.
pub(super) fn list(iso: &Iso, directory: Id, from: u64, take: Take<'_>) -> Result<()> {
    let own = iso.file(directory)?.record;
    if !own.is_directory() {
        return Err(Error::NotADirectory);
    }
    let start = own.first_block() * u64::from(iso.volume.block_bytes);
    let len = own.size_bytes.min(DIRECTORY_BYTES_MAX);
    let mut at = from;
    let mut sector = Sector::default();
    // A file in pieces that has begun, and how many of them were passed.
    let mut begun: Option<(Record, usize)> = None;
    while at < len {
        let Some(record) = sector.record(iso, start, len, at)? else {
            at = (at + 1).next_multiple_of(SECTOR_BYTES);
            continue;
        };
        at += record.len_bytes() as u64;
        let shown = match begun.take() {
            Some((first, passed)) if first.name() == record.name() && passed < SECTIONS_MAX => {
                if record.has_more() {
                    begun = Some((first, passed + 1));
                    continue;
                }
                first
            }
            cut_off => {
                // Of the one before the last piece is missing, which who reads it is told.
                let own = at - record.len_bytes() as u64;
                if let Some((first, _)) = cut_off
                    && !give(iso, &first, own, take)?
                {
                    return Ok(());
                }
                if record.has_more() {
                    begun = Some((record, 1));
                    continue;
                }
                record
            }
        };
        if !give(iso, &shown, at, take)? {
            return Ok(());
        }
    }
    match begun {
        Some((first, _)) => give(iso, &first, at, take).map(|_| ()),
        None => Ok(()),
    }
}

/// The sector that was read last.
#[derive(Default)]
struct Sector {
    at: Option<u64>,
    bytes: Vec<u8>,
}

impl Sector {
    /// The record `at` bytes into a directory that begins at `start` and is `len` bytes long;
    /// `None` if the sector has no more.
    fn record(&mut self, iso: &Iso, start: u64, len: u64, at: u64) -> Result<Option<Record>> {
        let own = at / SECTOR_BYTES * SECTOR_BYTES;
        if self.at != Some(own) {
            let own_len = (len - own).min(SECTOR_BYTES);
            self.bytes = iso.source.bytes(start + own, own_len as usize)?;
            self.at = Some(own);
        }
        let bytes = &self.bytes[(at - own) as usize..];
        match bytes.first() {
            None | Some(0) => Ok(None),
            Some(_) => {
                let bytes = &bytes[..bytes.len().min(RECORD_BYTES_MAX)];
                Record::decode(bytes, start + at).map(Some)
            }
        }
    }
}

/// Gives one file, if it is shown. `false`: no more are wanted.
fn give(iso: &Iso, record: &Record, next: u64, take: Take<'_>) -> Result<bool> {
    let is_special = matches!(record.name(), [0] | [1]);
    if is_special || record.is_associated() {
        return Ok(true);
    }
    let added = iso.added(record)?;
    let name = match (&added.name, iso.names) {
        (Some(name), _) => name.clone(),
        (None, Names::Plain { .. }) => names::plain(record),
        (None, Names::Joliet) => names::joliet(record),
    };
    if added.is_moved || !is_sound_name(&name) {
        return Ok(true);
    }
    Ok(take(&Entry {
        name: &name,
        id: record.place_bytes,
        kind: kind(record, &added),
        next,
    }))
}

fn kind(record: &Record, added: &SystemUse) -> Option<Kind> {
    match (&added.posix, added.child) {
        (_, Some(_)) => Some(Kind::Directory),
        (Some(posix), None) => Kind::of_mode(posix.mode),
        (None, None) if record.is_directory() => Some(Kind::Directory),
        (None, None) => Some(Kind::File),
    }
}

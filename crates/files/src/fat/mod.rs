//! FAT12, FAT16 and FAT32, with long names.
//!
//! `boot` decodes the first sector, `chain` follows clusters, `directory` and `names` read
//! entries.
//!
//! Invariants:
//! - A chain of clusters is followed for no more clusters than there are.
//! - A file's id is the place of its entry on the volume in units of 32 bytes; no entry is in
//!   the place of the root's.

mod boot;
mod chain;
mod directory;
mod names;

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::file_system::{Attributes, Entry, FileSystem, Id, Kind, ROOT, Time};
use crate::lookup::{Key, Lookups, Named};
use crate::source::Source;
use boot::{Boot, Root};
use directory::Slot;

/// Files whose last place is known.
const PLACES_MAX: usize = 256;
/// Longest directory that the format allows, in bytes.
const DIRECTORY_BYTES_MAX: u64 = 2 << 20;

/// A file system that is open.
pub(crate) struct Fat {
    source: Source,
    boot: Boot,
    free_clusters: u64,
    /// How far the chain of a file was followed when it was read last, by its first cluster.
    places: Mutex<HashMap<u32, chain::Position>>,
    lookups: Lookups,
}

/// Where a directory's entries are.
#[derive(Debug, Clone, Copy)]
enum Folder {
    /// In a place of its own.
    Fixed,
    /// In clusters, from that one on.
    Chain(u32),
}

impl Fat {
    /// Opens it.
    ///
    /// # Errors
    /// If its first sector makes no sense.
    pub(crate) fn open(source: Source) -> Result<Fat> {
        let boot = Boot::read(&source)?;
        let free_clusters = boot.free_clusters(&source);
        Ok(Fat {
            source,
            boot,
            free_clusters,
            places: Mutex::default(),
            lookups: Lookups::default(),
        })
    }

    fn slot(&self, id: Id) -> Result<Slot> {
        let at = id
            .checked_mul(directory::SLOT_BYTES as u64)
            .ok_or(Error::NotFound)?;
        let mut bytes = [0; directory::SLOT_BYTES];
        self.source.read(at, &mut bytes)?;
        Slot::decode(&bytes).ok_or(Error::NotFound)
    }

    fn folder(&self, id: Id) -> Result<Folder> {
        if id == ROOT {
            return Ok(match self.boot.root {
                Root::Fixed { .. } => Folder::Fixed,
                Root::Chain(first) => Folder::Chain(first),
            });
        }
        let slot = self.slot(id)?;
        match slot.kind() {
            Kind::Directory => Ok(Folder::Chain(slot.first_cluster)),
            _ => Err(Error::NotADirectory),
        }
    }

    /// Reads a part of a directory; where that lies on the volume. `None` behind its end.
    fn directory_piece(&self, folder: Folder, at: u64) -> Result<Option<(u64, Vec<u8>)>> {
        let (start, len) = match folder {
            Folder::Fixed => {
                let Root::Fixed {
                    start_bytes,
                    len_bytes,
                } = self.boot.root
                else {
                    return Ok(None);
                };
                if at >= len_bytes {
                    return Ok(None);
                }
                let len = (len_bytes - at).min(self.boot.cluster_bytes.into());
                (start_bytes + at, len)
            }
            Folder::Chain(first) => {
                let cluster_bytes = u64::from(self.boot.cluster_bytes);
                let index = u32::try_from(at / cluster_bytes).unwrap_or(u32::MAX);
                if at >= DIRECTORY_BYTES_MAX {
                    return Ok(None);
                }
                let Some(cluster) = self.cluster(first, index)? else {
                    return Ok(None);
                };
                (self.boot.cluster_place(cluster), cluster_bytes)
            }
        };
        let bytes = self.source.bytes(start, len as usize)?;
        Ok(Some((start, bytes)))
    }

    /// The cluster `index` of a chain; `None` behind its end.
    fn cluster(&self, first: u32, index: u32) -> Result<Option<u32>> {
        let known = self.places.lock().get(&first).copied();
        let found = chain::find(&self.source, &self.boot, first, index, known)?;
        if let Some(position) = found {
            let mut places = self.places.lock();
            if places.len() >= PLACES_MAX && !places.contains_key(&first) {
                places.clear();
            }
            places.insert(first, position);
        }
        Ok(found.map(|position| position.cluster))
    }

    fn walk(
        &self,
        directory: Id,
        from: u64,
        take: &mut dyn FnMut(&Entry<'_>, &Slot) -> bool,
    ) -> Result<()> {
        let folder = self.folder(directory)?;
        let mut reader = directory::Reader::new(from);
        // The parts of a long name stand before its entry.
        let first = from.saturating_sub(names::PARTS_MAX as u64);
        let piece_bytes = u64::from(self.boot.cluster_bytes);
        let mut at = first.saturating_mul(directory::SLOT_BYTES as u64) / piece_bytes * piece_bytes;
        while let Some((place, bytes)) = self.directory_piece(folder, at)? {
            if !reader.take_piece(at, place, &bytes, take) {
                return Ok(());
            }
            at += bytes.len() as u64;
        }
        Ok(())
    }
}

impl FileSystem for Fat {
    fn blocks(&self) -> (u32, u64, u64) {
        let boot = &self.boot;
        (boot.cluster_bytes, boot.clusters.into(), self.free_clusters)
    }

    fn attributes(&self, file: Id) -> Result<Attributes> {
        let cluster_bytes = u64::from(self.boot.cluster_bytes);
        let of = |kind, permissions, size_bytes: u64, [accessed, modified]: [Time; 2]| Attributes {
            kind,
            permissions,
            inode: file,
            links: if kind == Kind::Directory { 2 } else { 1 },
            owner: None,
            device: 0,
            size_bytes,
            blocks: size_bytes.next_multiple_of(cluster_bytes) / 512,
            accessed,
            modified,
            changed: modified,
        };
        if file == ROOT {
            return Ok(of(
                Kind::Directory,
                0o755,
                cluster_bytes,
                [Time::default(); 2],
            ));
        }
        let slot = self.slot(file)?;
        let times = [slot.accessed, slot.modified];
        Ok(match (slot.kind(), slot.is_read_only) {
            (Kind::Directory, _) => of(Kind::Directory, 0o755, cluster_bytes, times),
            (kind, true) => of(kind, 0o555, slot.size_bytes.into(), times),
            (kind, false) => of(kind, 0o755, slot.size_bytes.into(), times),
        })
    }

    fn lookup(&self, directory: Id, name: &[u8]) -> Result<Option<Id>> {
        let Ok(wanted) = std::str::from_utf8(name) else {
            return Ok(None);
        };
        let wanted = wanted.to_lowercase();
        self.lookups
            .find(directory, &[Key::Folded(&wanted)], &|from, take| {
                self.walk(directory, from, &mut |entry, slot| {
                    let [long, short] = [lowercase(entry.name), slot.short_name().to_lowercase()];
                    let keys = [Key::Folded(&long), Key::Folded(&short)];
                    let different = if long == short { 1 } else { 2 };
                    take(&Named::new(entry, &keys[..different]))
                })
            })
    }

    fn list(
        &self,
        directory: Id,
        from: u64,
        take: &mut dyn FnMut(&Entry<'_>) -> bool,
    ) -> Result<()> {
        self.walk(directory, from, &mut |entry, _| take(entry))
    }

    fn read(&self, file: Id, offset_bytes: u64, bytes: &mut [u8]) -> Result<usize> {
        if file == ROOT {
            return Err(Error::IsADirectory);
        }
        let slot = self.slot(file)?;
        if slot.kind() == Kind::Directory {
            return Err(Error::IsADirectory);
        }
        let left = u64::from(slot.size_bytes).saturating_sub(offset_bytes);
        let len = bytes.len().min(left as usize);
        let cluster_bytes = u64::from(self.boot.cluster_bytes);
        let mut done = 0;
        while done < len {
            let at = offset_bytes + done as u64;
            let index = (at / cluster_bytes) as u32;
            let damaged = || Error::damaged("the clusters of the file at entry", file);
            let first = self
                .cluster(slot.first_cluster, index)?
                .ok_or_else(damaged)?;
            // Neighbours are read at once.
            let offset = at % cluster_bytes;
            let wanted = (offset + (len - done) as u64).div_ceil(cluster_bytes) as u32;
            let mut count = 1;
            while count < wanted
                && self.cluster(slot.first_cluster, index + count)? == Some(first + count)
            {
                count += 1;
            }
            let there = u64::from(count) * cluster_bytes - offset;
            let now = (len - done).min(there as usize);
            let place = self.boot.cluster_place(first) + offset;
            self.source.read(place, &mut bytes[done..done + now])?;
            done += now;
        }
        Ok(len)
    }

    fn read_link(&self, _file: Id) -> Result<Vec<u8>> {
        Err(Error::WrongKind)
    }
}

/// A name as this file system compares it.
fn lowercase(name: &[u8]) -> String {
    String::from_utf8_lossy(name).to_lowercase()
}

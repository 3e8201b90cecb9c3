//! ISO9660, with the names and attributes of Rock Ridge, or the names of Joliet.
//!
//! `descriptors` finds the tree that is shown, `record` decodes what a directory has of a file,
//! `names` makes names of that, `directory` walks through directories, `system_use` reads what
//! Rock Ridge adds.
//!
//! Layouts are those of ECMA-119, of the specifications of SUSP, RRIP and Joliet, and of Linux's
//! manual of mkisofs for zisofs. What is shown, and how, is as Linux does it without options: of
//! several trees that of Rock Ridge, else that of Joliet; plain names in small letters without
//! their version; hidden files, but no associated ones.
//!
//! Invariants:
//! - A file's id is the place of its record on the volume in bytes. No record lies where ids are
//!   special: before the descriptors.
//! - A record of a file in several pieces is followed by those of the others; there are
//!   [`SECTIONS_MAX`] at most.

mod descriptors;
mod directory;
mod names;
mod record;
mod system_use;

use crate::error::{Error, Result};
use crate::file_system::{Attributes, Entry, FileSystem, Id, Kind, ROOT};
use crate::lookup::Lookups;
use crate::source::Source;
use descriptors::{DESCRIPTORS_BYTES, Volume};
use record::{RECORD_BYTES_MAX, Record};
use system_use::SystemUse;

/// What records do not lie across, in bytes.
const SECTOR_BYTES: u64 = 2048;
/// So many pieces of one file.
const SECTIONS_MAX: usize = 1000;

/// A file system that is open.
pub(crate) struct Iso {
    source: Source,
    volume: Volume,
    names: Names,
    remarks: Vec<String>,
    lookups: Lookups,
}

/// Where names come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Names {
    /// The records themselves; and what Rock Ridge adds, after so many bytes that are another's.
    Plain { skipped: usize },
    /// The records, in UTF-16.
    Joliet,
}

/// A file.
struct File {
    record: Record,
    added: SystemUse,
}

impl Iso {
    /// Opens it.
    ///
    /// # Errors
    /// If its descriptors or its root directory are damaged.
    pub(crate) fn open(source: Source) -> Result<Iso> {
        let found = descriptors::read(&source)?;
        let mut iso = Iso {
            source,
            volume: found.primary,
            names: Names::Plain { skipped: 0 },
            remarks: Vec::new(),
            lookups: Lookups::default(),
        };
        if found.has_udf {
            iso.remarks.push(
                "it has an UDF beside its ISO9660, which vellum does not read: there may be more \
                 files in that"
                    .to_owned(),
            );
        }
        let plain = iso.root_marks();
        match (plain, found.joliet) {
            (Ok(Some(skipped)), _) => iso.names = Names::Plain { skipped },
            (_, Some(joliet)) => {
                iso.volume = joliet;
                iso.names = Names::Joliet;
                iso.root_record()?;
            }
            (marks, None) => {
                marks?;
            }
        }
        Ok(iso)
    }

    /// What Rock Ridge says in the root directory: how much is another's in other records. `None`
    /// without Rock Ridge.
    fn root_marks(&self) -> Result<Option<usize>> {
        let record = self.root_record()?;
        Ok(system_use::mark(record.system_use()))
    }

    /// A directory's record of itself, its first one.
    fn self_record(&self, first_block: u64) -> Result<Record> {
        let block_bytes = u64::from(self.volume.block_bytes);
        let at = first_block.saturating_mul(block_bytes);
        let record = self.record(at)?;
        match record.is_directory() && record.name() == [0] {
            true => Ok(record),
            false => Err(Error::damaged("a directory's record of itself", at)),
        }
    }

    fn root_record(&self) -> Result<Record> {
        self.self_record(self.volume.root_block)
    }

    /// The record at a place.
    fn record(&self, at: u64) -> Result<Record> {
        if at < DESCRIPTORS_BYTES {
            return Err(Error::NotFound);
        }
        let left = SECTOR_BYTES.min(self.source.len_bytes().saturating_sub(at));
        let bytes = self.source.bytes(at, RECORD_BYTES_MAX.min(left as usize))?;
        Record::decode(&bytes, at)
    }

    fn added(&self, record: &Record) -> Result<SystemUse> {
        match self.names {
            Names::Plain { skipped } => system_use::read(self, record.system_use(), skipped),
            Names::Joliet => Ok(SystemUse::default()),
        }
    }

    fn file(&self, id: Id) -> Result<File> {
        let record = match id {
            ROOT => self.root_record()?,
            id => self.record(id)?,
        };
        let added = self.added(&record)?;
        let first_block = match added.child {
            // A directory that was moved elsewhere, for it was too deep.
            Some(block) => block.into(),
            None if record.is_directory() => record.first_block(),
            None => return Ok(File { record, added }),
        };
        // What a directory says of itself counts, as in Linux.
        let mut record = self.self_record(first_block)?;
        record.place_bytes = id;
        let added = self.added(&record)?;
        Ok(File { record, added })
    }

    /// The records of a file's pieces.
    fn sections(&self, first: Record) -> Result<Vec<Record>> {
        let damaged = Error::damaged("the pieces of the file", first.place_bytes);
        let mut sections = vec![first];
        while let Some(last) = sections.last().filter(|last| last.has_more()) {
            if sections.len() >= SECTIONS_MAX {
                return Err(damaged);
            }
            let mut at = last.place_bytes + last.len_bytes() as u64;
            let end = at + SECTOR_BYTES;
            while at < end && self.source.bytes(at, 1)? == [0] {
                at = (at + 1).next_multiple_of(self.volume.block_bytes.into());
            }
            let next = self.record(at)?;
            if next.is_directory() || next.name() != last.name() {
                return Err(damaged);
            }
            sections.push(next);
        }
        Ok(sections)
    }

    fn size_bytes(&self, file: &File) -> Result<u64> {
        if let Some(size_bytes) = file.added.compressed_from_bytes {
            return Ok(size_bytes.into());
        }
        if let Some(target) = &file.added.target {
            return Ok(target.len() as u64);
        }
        if !file.record.has_more() {
            return Ok(file.record.size_bytes);
        }
        let sections = self.sections(file.record.clone())?;
        Ok(sections.iter().map(|section| section.size_bytes).sum())
    }

    /// Reads content of one record.
    fn read_section(&self, section: &Record, at: u64, bytes: &mut [u8]) -> Result<()> {
        if section.is_interleaved() {
            return Err(Error::Unsupported("files that are interleaved".to_owned()));
        }
        let start = section.first_block() * u64::from(self.volume.block_bytes);
        self.source.read(start + at, bytes)
    }
}

impl FileSystem for Iso {
    fn remarks(&self) -> &[String] {
        &self.remarks
    }

    fn blocks(&self) -> (u32, u64, u64) {
        (self.volume.block_bytes, self.volume.blocks, 0)
    }

    fn attributes(&self, id: Id) -> Result<Attributes> {
        let file = self.file(id)?;
        let (record, added) = (&file.record, &file.added);
        if added.is_damaged {
            return Err(Error::damaged("what Rock Ridge has of a file", id));
        }
        let plain = match record.is_directory() {
            true => Kind::Directory,
            false => Kind::File,
        };
        let posix = added.posix;
        let kind = match posix {
            Some(posix) => Kind::of_mode(posix.mode),
            None => Some(plain),
        };
        // What is no directory cannot be listed, whatever is said of it.
        let is_sound = kind.is_some_and(|kind| (kind == Kind::Directory) == record.is_directory());
        let kind = kind
            .filter(|_| is_sound)
            .ok_or(Error::damaged("the mode of a file", id))?;
        let size_bytes = match kind {
            Kind::File | Kind::Directory | Kind::Link => self.size_bytes(&file)?,
            _ => 0,
        };
        let recorded = record.recorded();
        let is_device = matches!(kind, Kind::CharacterDevice | Kind::BlockDevice);
        let modified = added.modified.unwrap_or(recorded);
        Ok(Attributes {
            kind,
            permissions: posix.map_or(0o555, |posix| posix.mode & 0o7777),
            inode: record.place_bytes,
            links: posix.map_or(1, |posix| posix.links),
            owner: posix.map(|posix| (posix.user, posix.group)),
            device: if is_device { added.device } else { 0 },
            size_bytes,
            blocks: size_bytes.div_ceil(512),
            accessed: added.accessed.unwrap_or(recorded),
            modified,
            changed: added.changed.unwrap_or(recorded),
        })
    }

    fn lookup(&self, directory: Id, name: &[u8]) -> Result<Option<Id>> {
        directory::lookup(self, directory, name)
    }

    fn list(
        &self,
        directory: Id,
        from: u64,
        take: &mut dyn FnMut(&Entry<'_>) -> bool,
    ) -> Result<()> {
        directory::list(self, directory, from, take)
    }

    fn read(&self, id: Id, offset_bytes: u64, bytes: &mut [u8]) -> Result<usize> {
        let kind = self.attributes(id)?.kind;
        if kind == Kind::Directory {
            return Err(Error::IsADirectory);
        }
        if kind != Kind::File {
            return Err(Error::WrongKind);
        }
        let file = self.file(id)?;
        if let Some(how) = file.added.unreadable {
            return Err(Error::Unsupported(how.to_owned()));
        }
        let (mut start, mut done) = (0_u64, 0);
        for section in self.sections(file.record)? {
            let end = start + section.size_bytes;
            let at = offset_bytes.saturating_add(done as u64);
            if done < bytes.len() && at >= start && at < end {
                let now = (bytes.len() - done).min(usize::try_from(end - at).unwrap_or(usize::MAX));
                self.read_section(&section, at - start, &mut bytes[done..done + now])?;
                done += now;
            }
            start = end;
        }
        Ok(done)
    }

    fn read_link(&self, id: Id) -> Result<Vec<u8>> {
        if self.attributes(id)?.kind != Kind::Link {
            return Err(Error::WrongKind);
        }
        let target = self.file(id)?.added.target;
        let damaged = Error::damaged("a symbolic link", id);
        target
            .filter(|target| !target.is_empty() && !target.contains(&0))
            .ok_or(damaged)
    }
}

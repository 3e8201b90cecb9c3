//! ext2, ext3 and ext4.
//!
//! `superblock` and `inode` decode; `blocks` finds where a file's blocks are, `directory` reads
//! names, `inline` what lies in inodes themselves; `journal` finds what was not yet brought to
//! its place when the file system was last in use.
//!
//! Layouts are those of the kernel's documentation ("Data Structures and Algorithms", ext4).
//!
//! Invariants:
//! - No block outside of the file system is read.
//! - A file's id is the number of its inode; the root's is exchanged with 1, which names no file.

mod blocks;
mod checksums;
mod directory;
mod inline;
mod inode;
mod journal;
mod superblock;

use crate::error::{Error, Result};
use crate::file_system::{Attributes, Entry, FileSystem, Id, Kind, ROOT};
use crate::lookup::Lookups;
use crate::source::Source;
use inode::Inode;
use journal::Overlay;
use superblock::Superblock;

/// The root directory's inode.
const ROOT_INODE: u32 = 2;
/// Longest target of a symbolic link in bytes.
const TARGET_BYTES_MAX: u64 = 4095;

/// A file system that is open.
pub(crate) struct Ext {
    source: Source,
    superblock: Superblock,
    /// Blocks that are newer in the journal.
    overlay: Overlay,
    remarks: Vec<String>,
    lookups: Lookups,
}

impl Ext {
    /// Opens it.
    ///
    /// # Errors
    /// If its superblock or its root directory is damaged, or it uses what is not known here.
    pub(crate) fn open(source: Source) -> Result<Ext> {
        let superblock = Superblock::read(&source)?;
        let mut ext = Ext {
            source,
            superblock,
            overlay: Overlay::default(),
            remarks: Vec::new(),
            lookups: Lookups::default(),
        };
        if ext.superblock.needs_recovery() {
            match journal::read(&ext) {
                Ok((overlay, remarks)) => {
                    ext.overlay = overlay;
                    ext.remarks = remarks;
                }
                Err(error) => ext.remarks.push(format!(
                    "it was not unmounted, and its journal is left out ({error}): what was \
                     changed last may be old or damaged"
                )),
            }
        }
        let root = ext.inode(ROOT_INODE)?;
        match root.kind() {
            Some(Kind::Directory) => Ok(ext),
            _ => Err(Error::damaged(
                "the root directory's inode",
                ROOT_INODE.into(),
            )),
        }
    }

    fn inode(&self, number: u32) -> Result<Inode> {
        let at = self
            .superblock
            .inode_place(number, &mut |block, at, bytes| {
                self.read_block(block, at, bytes)
            })?;
        let mut bytes = vec![0; self.superblock.inode_bytes];
        self.read_block(at.block, at.offset, &mut bytes)?;
        Inode::decode(number, bytes, &self.superblock)
    }

    fn of_id(&self, id: Id) -> Result<Inode> {
        let number = match id {
            ROOT => ROOT_INODE,
            // No file: a list of bad blocks.
            2 => return Err(Error::NotFound),
            id => u32::try_from(id).map_err(|_| Error::NotFound)?,
        };
        self.inode(number)
    }

    /// Reads inside one block, as it is after the journal.
    fn read_block(&self, block: u64, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let block_bytes = self.superblock.block_bytes;
        if block >= self.superblock.blocks || offset + bytes.len() > block_bytes {
            return Err(Error::damaged("the number of a block", block));
        }
        if let Some(newer) = self.overlay.get(block) {
            return journal::read_newer(self, newer, offset, bytes);
        }
        let at = block * block_bytes as u64 + offset as u64;
        self.source.read(at, bytes)
    }

    /// Reads from neighbouring blocks.
    fn read_blocks(&self, block: u64, offset: usize, bytes: &mut [u8]) -> Result<()> {
        if block >= self.superblock.blocks {
            return Err(Error::damaged("the number of a block", block));
        }
        let block_bytes = self.superblock.block_bytes as u64;
        let start = block * block_bytes + offset as u64;
        if self.overlay.is_empty() {
            return self.source.read(start, bytes);
        }
        let mut at = start;
        let mut rest = bytes;
        while !rest.is_empty() {
            let offset = (at % block_bytes) as usize;
            let len = rest.len().min(self.superblock.block_bytes - offset);
            let (now, later) = rest.split_at_mut(len);
            self.read_block(at / block_bytes, offset, now)?;
            (at, rest) = (at + len as u64, later);
        }
        Ok(())
    }

    /// What of a file's content there is from `offset_bytes` on.
    fn read_content(&self, inode: &Inode, offset_bytes: u64, bytes: &mut [u8]) -> Result<usize> {
        let left = inode.size_bytes.saturating_sub(offset_bytes);
        let len = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let bytes = &mut bytes[..len];
        if inode.is_encrypted() {
            let what = "files that the file system encrypts".to_owned();
            return Err(Error::Unsupported(what));
        }
        if inode.is_inline() {
            inline::read(inode, offset_bytes, bytes)?;
            return Ok(len);
        }
        let block_bytes = self.superblock.block_bytes;
        let mut done = 0;
        while done < len {
            let at = offset_bytes + done as u64;
            let run = blocks::find(self, inode, at / block_bytes as u64)?;
            let offset = (at % block_bytes as u64) as usize;
            let there = (run.blocks.saturating_mul(block_bytes as u64)) - offset as u64;
            let now = (len - done).min(usize::try_from(there).unwrap_or(usize::MAX));
            let piece = &mut bytes[done..done + now];
            match run.first {
                Some(first) => self.read_blocks(first, offset, piece)?,
                None => piece.fill(0),
            }
            done += now;
        }
        Ok(len)
    }
}

/// The number of an inode as an id; `None` for those that no name may lead to.
fn id(inode: u32) -> Option<Id> {
    match inode {
        0 | 1 => None,
        ROOT_INODE => Some(ROOT),
        inode => Some(inode.into()),
    }
}

impl FileSystem for Ext {
    fn remarks(&self) -> &[String] {
        &self.remarks
    }

    fn blocks(&self) -> (u32, u64, u64) {
        let superblock = &self.superblock;
        (
            superblock.block_bytes as u32,
            superblock.blocks,
            superblock.free_blocks,
        )
    }

    fn attributes(&self, file: Id) -> Result<Attributes> {
        let inode = self.of_id(file)?;
        inode.attributes(&self.superblock)
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
        directory::list(self, &self.of_id(directory)?, from, take)
    }

    fn read(&self, file: Id, offset_bytes: u64, bytes: &mut [u8]) -> Result<usize> {
        let inode = self.of_id(file)?;
        match inode.kind() {
            Some(Kind::File) => self.read_content(&inode, offset_bytes, bytes),
            Some(Kind::Directory) => Err(Error::IsADirectory),
            _ => Err(Error::WrongKind),
        }
    }

    fn read_link(&self, file: Id) -> Result<Vec<u8>> {
        let inode = self.of_id(file)?;
        if inode.kind() != Some(Kind::Link) {
            return Err(Error::WrongKind);
        }
        if inode.size_bytes == 0 || inode.size_bytes > TARGET_BYTES_MAX {
            return Err(Error::damaged(
                "the length of a symbolic link of inode",
                file,
            ));
        }
        let mut target = vec![0; inode.size_bytes as usize];
        match inode.short_target() {
            Some(short) => target = short[..target.len()].to_vec(),
            None => {
                self.read_content(&inode, 0, &mut target)?;
            }
        }
        match target.contains(&0) {
            true => Err(Error::damaged("the symbolic link of inode", file)),
            false => Ok(target),
        }
    }
}

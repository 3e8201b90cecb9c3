//! XFS, versions 4 and 5.
//!
//! `superblock` and `inode` decode; `blocks` finds where a file's blocks are, `directory` reads
//! names, `log` tells whether it was unmounted.
//!
//! Layouts are those of the kernel's documentation ("XFS Algorithms & Data Structures").
//!
//! Invariants:
//! - No block outside of the file system is read.
//! - A file's id is the number of its inode; the root's is 1 instead, which names no file, for
//!   the first inodes of the volume lie behind the superblock.
//! - What has a checksum is read with it: what is damaged is an error, and harms no other file.
//!
//! The log is not replayed. What it alone holds is not shown, and what it holds in part may be
//! shown as damaged; [`Xfs::open`] has a remark of that.

mod blocks;
mod directory;
mod inode;
mod log;
mod superblock;

use crate::bytes::{be32, be64, has, part};
use crate::error::{Error, Result};
use crate::file_system::{Attributes, Entry, FileSystem, Id, Kind, ROOT};
use crate::lookup::Lookups;
use crate::source::Source;
use inode::{Form, Inode};
use superblock::{Superblock, is_intact};

pub(crate) use superblock::label;

/// Longest target of a symbolic link in bytes.
const TARGET_BYTES_MAX: u64 = 1024;
/// Before each part of a target, in version 5.
const TARGET_HEAD_BYTES: usize = 56;

/// A file system that is open.
pub(crate) struct Xfs {
    source: Source,
    superblock: Superblock,
    remarks: Vec<String>,
    lookups: Lookups,
}

impl Xfs {
    /// Opens it.
    ///
    /// # Errors
    /// If its superblock or its root directory is damaged, or it uses what is not known here.
    pub(crate) fn open(source: Source) -> Result<Xfs> {
        let superblock = Superblock::read(&source)?;
        let mut xfs = Xfs {
            source,
            superblock,
            remarks: Vec::new(),
            lookups: Lookups::default(),
        };
        // Whoever cannot read the log does not know what is in it.
        if !log::is_clean(&xfs).unwrap_or(false) {
            xfs.remarks.push(
                "it was not unmounted, and its log is not replayed: what was changed last is \
                 missing, old or damaged"
                    .to_owned(),
            );
        }
        if xfs.superblock.needs_repair {
            xfs.remarks
                .push("it needs xfs_repair: what it shows may be wrong".to_owned());
        }
        match xfs.inode(xfs.superblock.root_inode)?.kind() {
            Kind::Directory => Ok(xfs),
            _ => Err(Error::damaged(
                "the root directory's inode",
                xfs.superblock.root_inode,
            )),
        }
    }

    fn inode(&self, number: u64) -> Result<Inode> {
        let place = self.superblock.inode_place(number);
        let at = place.ok_or(Error::damaged("the number of an inode", number))?;
        let bytes = self.source.bytes(at, self.superblock.inode_bytes)?;
        Inode::decode(number, bytes, &self.superblock)
    }

    fn of_id(&self, id: Id) -> Result<Inode> {
        match id {
            ROOT => self.inode(self.superblock.root_inode),
            id => self.inode(id),
        }
    }

    /// The number of an inode as an id; `None` for those that no name may lead to.
    fn id(&self, inode: u64) -> Option<Id> {
        match inode {
            0 | ROOT => None,
            inode if inode == self.superblock.root_inode => Some(ROOT),
            inode if inode < 1 << 56 => Some(inode),
            _ => None,
        }
    }

    fn bytes_of_block(&self, block: u64) -> Result<Vec<u8>> {
        let place = self.superblock.block_place(block);
        let at = place.ok_or(Error::damaged("the number of a block", block))?;
        self.source.bytes(at, self.superblock.block_bytes)
    }

    /// Reads from neighbouring blocks.
    fn read_blocks(&self, block: u64, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let block_bytes = self.superblock.block_bytes as u64;
        let last = block + (offset + bytes.len().max(1) as u64 - 1) / block_bytes;
        let place = |block| self.superblock.block_place(block);
        let damaged = || Error::damaged("the number of a block", block);
        let (start, end) = (
            place(block).ok_or_else(damaged)?,
            place(last).ok_or_else(damaged)?,
        );
        // An extent is inside of one group.
        if end - start.min(end) != (last - block) * block_bytes {
            return Err(damaged());
        }
        self.source.read(start + offset, bytes)
    }

    /// Fills `bytes` with what stands in the file's blocks; zeroes where there are none.
    fn read_content(&self, inode: &Inode, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        let block_bytes = self.superblock.block_bytes as u64;
        let mut done = 0;
        while done < bytes.len() {
            let at = offset_bytes.saturating_add(done as u64);
            let run = blocks::find(self, inode, at / block_bytes)?;
            let offset = at % block_bytes;
            let there = run.blocks.saturating_mul(block_bytes) - offset;
            let now = (bytes.len() - done).min(usize::try_from(there).unwrap_or(usize::MAX));
            let piece = &mut bytes[done..done + now];
            match run.first {
                Some(first) => self.read_blocks(first, offset, piece)?,
                None => piece.fill(0),
            }
            done += now;
        }
        Ok(())
    }

    /// The target of a link that has no room in the inode: in version 5 each of its extents
    /// begins with a head of its own.
    fn long_target(&self, inode: &Inode) -> Result<Vec<u8>> {
        let len = inode.size_bytes as usize;
        if !self.superblock.is_version_5 {
            let mut target = vec![0; len];
            self.read_content(inode, 0, &mut target)?;
            return Ok(target);
        }
        let damaged = || Error::damaged("the symbolic link of inode", inode.number);
        let block_bytes = self.superblock.block_bytes as u64;
        let (mut target, mut index) = (Vec::new(), 0);
        while target.len() < len {
            let run = blocks::find(self, inode, index)?;
            let first = run.first.ok_or_else(damaged)?;
            // No more than a target can need.
            let most = (TARGET_BYTES_MAX * 2).div_ceil(block_bytes);
            let mut bytes = vec![0; (run.blocks.min(most) * block_bytes) as usize];
            self.read_blocks(first, 0, &mut bytes)?;
            let own = be32(&bytes, 8) as usize;
            let is_sound = has(&bytes, 0, b"XSLM")
                && be32(&bytes, 4) as usize == target.len()
                && be64(&bytes, 32) == inode.number
                && (1..=len - target.len()).contains(&own)
                && is_intact(&bytes, 12);
            let text = part(&bytes, TARGET_HEAD_BYTES..TARGET_HEAD_BYTES + own);
            if !is_sound || text.len() != own {
                return Err(damaged());
            }
            target.extend(text);
            index += run.blocks;
        }
        Ok(target)
    }
}

impl FileSystem for Xfs {
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
        Ok(inode.attributes(&self.superblock))
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
            Kind::File => {}
            Kind::Directory => return Err(Error::IsADirectory),
            _ => return Err(Error::WrongKind),
        }
        if inode.is_real_time() {
            let what = "files on a device for real time".to_owned();
            return Err(Error::Unsupported(what));
        }
        let left = inode.size_bytes.saturating_sub(offset_bytes);
        let len = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        self.read_content(&inode, offset_bytes, &mut bytes[..len])?;
        Ok(len)
    }

    fn read_link(&self, file: Id) -> Result<Vec<u8>> {
        let inode = self.of_id(file)?;
        if inode.kind() != Kind::Link {
            return Err(Error::WrongKind);
        }
        let damaged = || Error::damaged("the symbolic link of inode", inode.number);
        if inode.size_bytes == 0 || inode.size_bytes > TARGET_BYTES_MAX {
            return Err(damaged());
        }
        let target = match inode.form {
            Form::Local => part(inode.fork(), 0..inode.size_bytes as usize).to_vec(),
            _ => self.long_target(&inode)?,
        };
        let is_sound = target.len() as u64 == inode.size_bytes && !target.contains(&0);
        is_sound.then_some(target).ok_or_else(damaged)
    }
}

//! Inodes.
//!
//! ```text
//! 00 IN        10 links            38 size         52 bytes of the first  64 version 3: checksum
//! 02 mode      18 extents, if      40 blocks          fork / 8            78 more flags
//! 04 version      large counts     4c extents      53 form of attributes  90 created
//! 05 form      20 accessed         50 extents of   5a flags               98 its own number
//! 08 user      28 modified            attributes   5c generation          a0 UUID
//! 0c group     30 changed
//! ```
//!
//! The forks follow: the content, or what leads to it; and attributes, which are not read.

use super::superblock::{Superblock, is_intact};
use crate::bytes::{be16, be32, be64, has, part, u8_at};
use crate::error::{Error, Result};
use crate::file_system::{Attributes, Kind, Time};

const CHECKSUM_AT: usize = 0x64;
const REAL_TIME: u16 = 0x1;
const BIG_TIMES: u64 = 0x8;
const LARGE_COUNTS: u64 = 0x10;
/// A time of the newer form counts nanoseconds from here on, in seconds before 1970.
const BIG_TIME_START: i64 = 1 << 31;
const NANOSECONDS: u64 = 1_000_000_000;

/// How the content is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// The number of a device.
    Device,
    /// In the inode.
    Local,
    /// In extents, which the inode lists.
    Extents,
    /// In extents, which a tree lists.
    Tree,
}

/// What a file keeps beside its content.
#[derive(Debug)]
pub(super) struct Inode {
    pub(super) number: u64,
    pub(super) size_bytes: u64,
    pub(super) form: Form,
    kind: Kind,
    flags_2: u64,
    /// All of it.
    bytes: Vec<u8>,
}

impl Inode {
    /// Takes it apart.
    pub(super) fn decode(number: u64, bytes: Vec<u8>, of: &Superblock) -> Result<Inode> {
        let damaged = |structure| Error::damaged(structure, number);
        let version = u8_at(&bytes, 4);
        let is_known = match of.is_version_5 {
            true => version == 3,
            false => version == 1 || version == 2,
        };
        if !has(&bytes, 0, b"IN") || !is_known {
            return Err(damaged("inode"));
        }
        if of.is_version_5 {
            if !is_intact(&bytes, CHECKSUM_AT) {
                return Err(damaged("the checksum of inode"));
            }
            if be64(&bytes, 0x98) != number || !has(&bytes, 0xa0, &of.uuid) {
                return Err(damaged("the owner of inode"));
            }
        }
        let form = match u8_at(&bytes, 5) {
            0 => Form::Device,
            1 => Form::Local,
            2 => Form::Extents,
            3 => Form::Tree,
            _ => return Err(damaged("the form of inode")),
        };
        let kind = Kind::of_mode(be16(&bytes, 2).into()).ok_or(damaged("the mode of inode"))?;
        let is_fitting = match kind {
            Kind::File => matches!(form, Form::Extents | Form::Tree),
            Kind::Directory | Kind::Link => form != Form::Device,
            _ => form == Form::Device,
        };
        let size_bytes = be64(&bytes, 0x38);
        if !is_fitting || size_bytes > i64::MAX as u64 {
            return Err(damaged("the form of inode"));
        }
        Ok(Inode {
            number,
            size_bytes,
            form,
            kind,
            flags_2: if version == 3 { be64(&bytes, 0x78) } else { 0 },
            bytes,
        })
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether the content is on another device.
    pub(super) fn is_real_time(&self) -> bool {
        be16(&self.bytes, 0x5a) & REAL_TIME != 0
    }

    /// The fork of the content.
    pub(super) fn fork(&self) -> &[u8] {
        let start = match u8_at(&self.bytes, 4) {
            3 => 176,
            _ => 100,
        };
        let end = match usize::from(u8_at(&self.bytes, 0x52)) {
            0 => self.bytes.len(),
            eights => start + eights * 8,
        };
        part(&self.bytes, start..end)
    }

    /// How many extents the content has.
    pub(super) fn extents(&self) -> u64 {
        match self.flags_2 & LARGE_COUNTS != 0 {
            true => be64(&self.bytes, 0x18),
            false => be32(&self.bytes, 0x4c).into(),
        }
    }

    pub(super) fn attributes(&self, of: &Superblock) -> Attributes {
        let bytes = &self.bytes;
        let links = match u8_at(bytes, 4) {
            1 => u32::from(be16(bytes, 6)),
            _ => be32(bytes, 0x10),
        };
        let block_bytes = of.block_bytes as u64;
        Attributes {
            kind: self.kind,
            permissions: u32::from(be16(bytes, 2)) & 0o7777,
            inode: self.number,
            links,
            owner: Some((be32(bytes, 0x08), be32(bytes, 0x0c))),
            device: self.device(),
            size_bytes: self.size_bytes,
            blocks: be64(bytes, 0x40).saturating_mul(block_bytes) / 512,
            accessed: self.time(0x20),
            modified: self.time(0x28),
            changed: self.time(0x30),
        }
    }

    /// Fourteen bits of one number and eighteen of the other, in another order than the kernel's.
    fn device(&self) -> u32 {
        if self.form != Form::Device || matches!(self.kind, Kind::Fifo | Kind::Socket) {
            return 0;
        }
        let number = be32(self.fork(), 0);
        let (major, minor) = (number >> 18 & 0xfff, number & 0x3_ffff);
        (minor & 0xff) | major << 8 | (minor & !0xff) << 12
    }

    fn time(&self, at: usize) -> Time {
        if self.flags_2 & BIG_TIMES != 0 {
            let count = be64(&self.bytes, at);
            return Time {
                seconds: (count / NANOSECONDS) as i64 - BIG_TIME_START,
                nanoseconds: (count % NANOSECONDS) as u32,
            };
        }
        Time {
            seconds: (be32(&self.bytes, at) as i32).into(),
            nanoseconds: be32(&self.bytes, at + 4).min(999_999_999),
        }
    }
}

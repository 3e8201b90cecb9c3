//! The descriptors of the volume, from its sector 16 on.
//!
//! ```text
//! 00 type: 1 primary, 2 another tree, 255 the last one    50 blocks           58 escapes
//! 01 CD001                                                80 bytes of a block 9c record of the
//! 28 name of the volume                                                          root directory
//! ```

use super::SECTOR_BYTES;
use super::record::Record;
use crate::bytes::{has, le16, le32, part, u8_at};
use crate::error::{Error, Result};
use crate::source::Source;

/// Where they begin.
pub(super) const DESCRIPTORS_BYTES: u64 = 16 * SECTOR_BYTES;
/// So many are looked at, as Linux does.
const DESCRIPTORS_MAX: u64 = 84;
const PRIMARY: u8 = 1;
const SUPPLEMENTARY: u8 = 2;
const END: u8 = 255;
/// The escape sequences of UCS-2, levels 1 to 3.
const JOLIET: [&[u8]; 3] = [b"%/@", b"%/C", b"%/E"];

/// A tree of directories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Volume {
    pub(super) block_bytes: u32,
    pub(super) blocks: u64,
    /// Where the root directory begins.
    pub(super) root_block: u64,
}

/// What descriptors tell.
#[derive(Debug)]
pub(super) struct Descriptors {
    pub(super) primary: Volume,
    pub(super) joliet: Option<Volume>,
    pub(super) has_udf: bool,
}

/// Reads them.
pub(super) fn read(source: &Source) -> Result<Descriptors> {
    let (mut primary, mut joliet, mut has_udf) = (None, None, false);
    for number in 0..DESCRIPTORS_MAX {
        let at = DESCRIPTORS_BYTES + number * SECTOR_BYTES;
        if at + SECTOR_BYTES > source.len_bytes() {
            break;
        }
        let bytes = source.bytes(at, SECTOR_BYTES as usize)?;
        // Those of UDF follow the last one of ISO9660.
        has_udf |= has(&bytes, 1, b"NSR02") || has(&bytes, 1, b"NSR03");
        let is_another = [&b"BEA01"[..], b"NSR02", b"NSR03", b"TEA01", b"BOOT2"];
        if is_another.iter().any(|mark| has(&bytes, 1, mark)) {
            continue;
        }
        if !has(&bytes, 1, b"CD001") {
            break;
        }
        match u8_at(&bytes, 0) {
            PRIMARY if primary.is_none() => primary = Some(volume(&bytes, at)?),
            SUPPLEMENTARY if joliet.is_none() && is_joliet(&bytes) => {
                // Whoever cannot read it still has the primary one.
                joliet = volume(&bytes, at).ok();
            }
            END | PRIMARY | SUPPLEMENTARY => {}
            _ => {}
        }
    }
    match primary {
        Some(primary) => Ok(Descriptors {
            primary,
            joliet,
            has_udf,
        }),
        None => Err(Error::damaged(
            "the primary volume descriptor",
            DESCRIPTORS_BYTES,
        )),
    }
}

fn is_joliet(descriptor: &[u8]) -> bool {
    let escapes = part(descriptor, 0x58..0x5b);
    JOLIET.contains(&escapes)
}

fn volume(descriptor: &[u8], at: u64) -> Result<Volume> {
    let block_bytes = u32::from(le16(descriptor, 0x80));
    let is_sound = block_bytes.is_power_of_two() && (512..=2048).contains(&block_bytes);
    if !is_sound {
        return Err(Error::damaged("the size of blocks", at + 0x80));
    }
    let root = Record::decode(part(descriptor, 0x9c..0xbe), at + 0x9c)?;
    Ok(Volume {
        block_bytes,
        blocks: le32(descriptor, 0x50).into(),
        root_block: root.first_block(),
    })
}

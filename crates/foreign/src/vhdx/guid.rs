//! GUIDs, as VHDX stores them, and those that it knows.

use std::fmt;

use vellum::Result;

use super::le;
use crate::random_id::random_id;

/// A GUID in its binary form: the first three of its five groups are little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Guid(pub(super) [u8; 16]);

impl Guid {
    /// All zero: "none".
    pub const NIL: Guid = Guid([0; 16]);

    pub(super) const BAT_REGION: Guid =
        Guid::new(0x2dc2_7766, 0xf623, 0x4200, 0x9d64_115e_9bfd_4a08);
    pub(super) const METADATA_REGION: Guid =
        Guid::new(0x8b7c_a206, 0x4790, 0x4b9a, 0xb8fe_575f_050f_886e);
    pub(super) const FILE_PARAMETERS: Guid =
        Guid::new(0xcaa1_6737, 0xfa36, 0x4d43, 0xb3b6_33f0_aa44_e76b);
    pub(super) const VIRTUAL_DISK_SIZE: Guid =
        Guid::new(0x2fa5_4224, 0xcd1b, 0x4876, 0xb211_5dbe_d83b_f4b8);
    /// The disk's identity; QEMU calls it the page 83 data, for the SCSI page that shows it.
    pub(super) const VIRTUAL_DISK_ID: Guid =
        Guid::new(0xbeca_12ab, 0xb2e6, 0x4523, 0x93ef_c309_e000_c746);
    pub(super) const LOGICAL_SECTOR_SIZE: Guid =
        Guid::new(0x8141_bf1d, 0xa96f, 0x4709, 0xba47_f233_a8fa_ab5f);
    pub(super) const PHYSICAL_SECTOR_SIZE: Guid =
        Guid::new(0xcda3_48c7, 0x445d, 0x4471, 0x9cc9_e988_5251_c556);
    pub(super) const PARENT_LOCATOR: Guid =
        Guid::new(0xa8d3_5f2d, 0xb30b, 0x454d, 0xabf7_d3d8_4834_ab0c);
    /// The kind of parent that is itself a VHDX.
    pub(super) const PARENT_IS_VHDX: Guid =
        Guid::new(0xb04a_efb7, 0xd19e, 0x4a81, 0xb789_25b8_e944_5913);

    const fn new(a: u32, b: u16, c: u16, rest: u64) -> Guid {
        let (a, b, c, rest) = (
            a.to_le_bytes(),
            b.to_le_bytes(),
            c.to_le_bytes(),
            rest.to_be_bytes(),
        );
        Guid([
            a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], rest[0], rest[1], rest[2], rest[3],
            rest[4], rest[5], rest[6], rest[7],
        ])
    }

    /// The GUID at an offset of a structure.
    pub(super) fn at(bytes: &[u8], at: usize) -> Option<Guid> {
        le::array(bytes, at).map(Guid)
    }

    /// A new one, at random.
    pub(super) fn random() -> Result<Guid> {
        random_id().map(Guid)
    }

    /// Whether it is [`Guid::NIL`].
    pub fn is_nil(self) -> bool {
        self == Guid::NIL
    }

    /// Reads the usual text, in braces or not, in any case.
    pub fn parse(text: &str) -> Option<Guid> {
        let text = text.strip_prefix('{').unwrap_or(text);
        let text = text.strip_suffix('}').unwrap_or(text);
        let mut groups = text.split('-');
        let mut group = |digits: usize| {
            let group = groups.next()?;
            let is_hex = group.len() == digits && group.bytes().all(|b| b.is_ascii_hexdigit());
            is_hex.then(|| u64::from_str_radix(group, 16).ok())?
        };
        let (a, b, c) = (group(8)?, group(4)?, group(4)?);
        let rest = group(4)? << 48 | group(12)?;
        if groups.next().is_some() {
            return None;
        }
        Some(Guid::new(a as u32, b as u16, c as u16, rest))
    }
}

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const ORDER: [usize; 16] = [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15];
        for (at, index) in ORDER.into_iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{:02x}", self.0[index])?;
        }
        Ok(())
    }
}

impl fmt::Debug for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_goes_there_and_back() {
        let text = "2dc27766-f623-4200-9d64-115e9bfd4a08";
        assert_eq!(Guid::BAT_REGION.to_string(), text);
        assert_eq!(Guid::parse(text), Some(Guid::BAT_REGION));
        let braced = format!("{{{}}}", text.to_uppercase());
        assert_eq!(Guid::parse(&braced), Some(Guid::BAT_REGION));
        for wrong in ["", "{}", "2dc27766", "+dc27766-f623-4200-9d64-115e9bfd4a08"] {
            assert_eq!(Guid::parse(wrong), None, "{wrong}");
        }
        assert_eq!(Guid::BAT_REGION.0[..4], [0x66, 0x77, 0xc2, 0x2d]);
    }
}

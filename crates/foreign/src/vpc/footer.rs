//! The footer, which dynamic images also begin with: who made the image, of which kind and size it is.

use std::time::{SystemTime, UNIX_EPOCH};

use vellum::{Error, ErrorKind, Result};

use super::geometry::Geometry;
use crate::fields::put;

/// What a footer takes, in bytes.
pub(super) const LEN_BYTES: usize = 512;
pub(super) const COOKIE: &[u8; 8] = b"conectix";
/// The largest disk that there may be, in sectors: 2040 GiB.
pub(super) const MAX_SECTORS: u64 = 0xff00_0000;
/// 2000-01-01, in seconds since 1970.
const EPOCH_SECONDS: u64 = 946_684_800;
/// Where the checksum stands.
const SUM_AT: usize = 64;

/// The kind of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Fixed,
    Dynamic,
    Differencing,
}

/// Which of the two sizes that a footer has is believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SizeCalculation {
    /// By who made the image: Virtual PC and QEMU round to whole cylinders.
    #[default]
    Auto,
    /// The size in bytes.
    CurrentSize,
    /// Cylinders, heads and sectors.
    Chs,
}

impl SizeCalculation {
    /// From its name, a value of the node's option `force_size_calc` (QEMU has no word for the first).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`], in QEMU's words, for anything else.
    pub fn parse(name: &str) -> Result<SizeCalculation> {
        match name {
            "auto" => Ok(SizeCalculation::Auto),
            "current_size" => Ok(SizeCalculation::CurrentSize),
            "chs" => Ok(SizeCalculation::Chs),
            _ => {
                let message = format!("Invalid size calculation mode: '{name}'");
                Err(Error::new(ErrorKind::InvalidArgument, "open", message))
            }
        }
    }
}

/// A footer, as it is on disk: it is written again as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Footer(Box<[u8; LEN_BYTES]>);

impl Footer {
    /// Takes bytes that begin as a footer does.
    pub(super) fn decode(bytes: &[u8]) -> Option<Footer> {
        let bytes = bytes.first_chunk::<LEN_BYTES>()?;
        bytes.starts_with(COOKIE).then(|| Footer(Box::new(*bytes)))
    }

    /// The footer of a new image.
    pub(super) fn new(
        kind: Kind,
        creator: &[u8; 4],
        size_bytes: u64,
        geometry: Geometry,
        id: &[u8; 16],
    ) -> Footer {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let seconds = now.map_or(0, |now| now.as_secs().saturating_sub(EPOCH_SECONDS));
        let (kind, next): (u32, u64) = match kind {
            Kind::Fixed => (2, u64::MAX),
            Kind::Dynamic => (3, LEN_BYTES as u64),
            Kind::Differencing => (4, LEN_BYTES as u64),
        };
        let mut bytes = Box::new([0; LEN_BYTES]);
        put(&mut *bytes, 0, COOKIE);
        put(&mut *bytes, 8, &2u32.to_be_bytes());
        put(&mut *bytes, 12, &0x0001_0000u32.to_be_bytes());
        put(&mut *bytes, 16, &next.to_be_bytes());
        put(&mut *bytes, 24, &(seconds as u32).to_be_bytes());
        put(&mut *bytes, 28, creator);
        // That of Virtual PC 2007, on Windows 2000.
        put(&mut *bytes, 32, &[0, 5, 0, 3]);
        put(&mut *bytes, 36, b"Wi2k");
        put(&mut *bytes, 40, &size_bytes.to_be_bytes());
        put(&mut *bytes, 48, &size_bytes.to_be_bytes());
        put(&mut *bytes, 56, &geometry.cylinders.to_be_bytes());
        put(&mut *bytes, 58, &[geometry.heads, geometry.sectors]);
        put(&mut *bytes, 60, &kind.to_be_bytes());
        put(&mut *bytes, 68, id);
        let sum = checksum(&*bytes, SUM_AT);
        put(&mut *bytes, SUM_AT, &sum.to_be_bytes());
        Footer(bytes)
    }

    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        let chunk = self.0.get(at..).and_then(|rest| rest.first_chunk());
        chunk.copied().unwrap_or([0; N])
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &*self.0
    }

    pub(super) fn has_right_checksum(&self) -> bool {
        u32::from_be_bytes(self.array(SUM_AT)) == checksum(&*self.0, SUM_AT)
    }

    /// `None` for kinds that have gone out of use.
    pub(super) fn kind(&self) -> Option<Kind> {
        match u32::from_be_bytes(self.array(60)) {
            2 => Some(Kind::Fixed),
            3 => Some(Kind::Dynamic),
            4 => Some(Kind::Differencing),
            _ => None,
        }
    }

    /// Where the header of a dynamic image is, in bytes.
    pub(super) fn header_bytes(&self) -> u64 {
        u64::from_be_bytes(self.array(16))
    }

    pub(super) fn id(&self) -> [u8; 16] {
        self.array(68)
    }

    fn geometry(&self) -> Geometry {
        let [heads, sectors] = self.array(58);
        Geometry {
            cylinders: u16::from_be_bytes(self.array(56)),
            heads,
            sectors,
        }
    }

    /// The size of the disk, in sectors: what is believed of it.
    pub(super) fn sectors(&self, calculation: SizeCalculation) -> u64 {
        let geometry = self.geometry();
        let is_rounded = matches!(&self.array(28), b"vpc " | b"qemu");
        let is_chs = match calculation {
            SizeCalculation::Auto => is_rounded,
            SizeCalculation::CurrentSize => false,
            SizeCalculation::Chs => true,
        };
        // Disks that no geometry tells have the largest.
        match is_chs && geometry.total() != Geometry::LARGEST.total() {
            true => geometry.total(),
            false => u64::from_be_bytes(self.array(48)) / 512,
        }
    }
}

/// The sum of all bytes but those of the sum itself (4 of them), inverted.
pub(super) fn checksum(bytes: &[u8], at: usize) -> u32 {
    let sum = bytes.iter().enumerate().fold(0u32, |sum, (index, byte)| {
        match (at..at + 4).contains(&index) {
            true => sum,
            false => sum.wrapping_add(u32::from(*byte)),
        }
    });
    !sum
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn footer(creator: &[u8; 4], geometry: Geometry) -> Footer {
        Footer::new(Kind::Dynamic, creator, 10 << 20, geometry, &[7; 16])
    }

    #[test]
    fn a_footer_goes_there_and_back() {
        let geometry = Geometry::of(20480);
        let footer = footer(b"qemu", geometry);
        let read = Footer::decode(footer.bytes()).unwrap();
        assert!(read.has_right_checksum());
        assert_eq!(read.kind(), Some(Kind::Dynamic));
        assert_eq!((read.header_bytes(), read.id()), (512, [7; 16]));
        assert_eq!(read.geometry(), geometry);
        let mut bytes = footer.bytes().to_vec();
        bytes[100] = 1;
        assert!(!Footer::decode(&bytes).unwrap().has_right_checksum());
        bytes[0] = 0;
        assert_eq!(Footer::decode(&bytes), None);
    }

    #[test]
    fn the_size_is_the_one_that_the_creator_means() {
        let geometry = Geometry::of(20480);
        assert_eq!(geometry.total(), 20468);
        for (creator, auto) in [
            (b"vpc ", 20468),
            (b"qemu", 20468),
            (b"qem2", 20480),
            (b"win ", 20480),
            (b"d2v ", 20480),
            (b"tap\0", 20480),
            (b"vs  ", 20480),
            (b"wa\0\0", 20480),
        ] {
            let footer = footer(creator, geometry);
            assert_eq!(footer.sectors(SizeCalculation::Auto), auto);
            assert_eq!(footer.sectors(SizeCalculation::Chs), 20468);
            assert_eq!(footer.sectors(SizeCalculation::CurrentSize), 20480);
        }
        let largest = footer(b"qemu", Geometry::LARGEST);
        assert_eq!(largest.sectors(SizeCalculation::Chs), 20480);
        let error = SizeCalculation::parse("x").unwrap_err();
        assert_eq!(error.message(), "Invalid size calculation mode: 'x'");
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_footer_or_none(mut bytes in proptest::collection::vec(any::<u8>(), 500..520)) {
            put(&mut bytes, 0, COOKIE);
            if let Some(footer) = Footer::decode(&bytes) {
                let _ = (footer.kind(), footer.has_right_checksum(), footer.sectors(SizeCalculation::Auto));
            }
        }
    }
}

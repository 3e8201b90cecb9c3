//! The metadata region: a table of items, and the items that an image has to have.

use vellum::{Error, ErrorKind, Result};

use super::guid::Guid;
use super::{invalid, le};

/// What the table takes; items come behind it.
pub(super) const TABLE_BYTES: usize = 64 << 10;
/// The largest size of a disk, in bytes.
pub(super) const MAX_SIZE_BYTES: u64 = 64 << 40;
pub(super) const MIN_BLOCK_BYTES: u64 = 1 << 20;
pub(super) const MAX_BLOCK_BYTES: u64 = 256 << 20;
const MAX_ITEM_BYTES: u32 = 1 << 20;

/// Where an item is, in bytes from the beginning of the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Item {
    pub offset_bytes: u32,
    pub len_bytes: u32,
}

/// The items that are known; all but the last have to be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Items {
    pub file_parameters: Item,
    pub virtual_disk_size: Item,
    pub logical_sector_size: Item,
    pub parent_locator: Option<Item>,
}

impl Items {
    /// Reads the table of a region of `region_bytes`.
    pub(super) fn decode(table: &[u8], region_bytes: u32) -> Result<Items> {
        let count = le::le16(table, 10).unwrap_or(0);
        if !table.starts_with(b"metadata") {
            return Err(invalid("the VHDX image has no metadata table"));
        }
        if usize::from(count) * 32 > TABLE_BYTES - 32 {
            return Err(invalid("the VHDX metadata table has too many entries"));
        }
        const KNOWN: [Guid; 6] = [
            Guid::FILE_PARAMETERS,
            Guid::VIRTUAL_DISK_SIZE,
            Guid::LOGICAL_SECTOR_SIZE,
            Guid::VIRTUAL_DISK_ID,
            Guid::PHYSICAL_SECTOR_SIZE,
            Guid::PARENT_LOCATOR,
        ];
        let mut found = [None; KNOWN.len()];
        let entries = table.get(32..).unwrap_or_default().chunks_exact(32);
        for entry in entries.take(count.into()) {
            let Some((id, item, flags)) = decode_entry(entry) else {
                break;
            };
            match KNOWN.iter().position(|known| *known == id) {
                Some(at) => {
                    if found[at].replace(item).is_some() {
                        return Err(invalid("the VHDX metadata table names an item twice"));
                    }
                    item.check(region_bytes)?;
                }
                None if flags & IS_REQUIRED != 0 => {
                    let message = format!("the VHDX image needs metadata of an unknown kind, {id}");
                    return Err(Error::new(ErrorKind::Unsupported, "open", message));
                }
                None => {}
            }
        }
        match found {
            [
                Some(file_parameters),
                Some(virtual_disk_size),
                Some(logical_sector_size),
                Some(_),
                Some(_),
                parent_locator,
            ] => Ok(Items {
                file_parameters,
                virtual_disk_size,
                logical_sector_size,
                parent_locator,
            }),
            _ => {
                let message = "the VHDX image lacks metadata that it has to have";
                Err(Error::new(ErrorKind::Unsupported, "open", message))
            }
        }
    }
}

impl Item {
    fn check(self, region_bytes: u32) -> Result<()> {
        let end = self.offset_bytes.checked_add(self.len_bytes);
        let is_inside = self.offset_bytes as usize >= TABLE_BYTES
            && self.len_bytes <= MAX_ITEM_BYTES
            && end.is_some_and(|end| end <= region_bytes);
        match is_inside {
            true => Ok(()),
            false => Err(invalid("a VHDX metadata item lies outside of its region")),
        }
    }
}

const IS_VIRTUAL_DISK: u32 = 2;
const IS_REQUIRED: u32 = 4;

fn decode_entry(bytes: &[u8]) -> Option<(Guid, Item, u32)> {
    let item = Item {
        offset_bytes: le::le32(bytes, 16)?,
        len_bytes: le::le32(bytes, 20)?,
    };
    Some((Guid::at(bytes, 0)?, item, le::le32(bytes, 24)?))
}

/// What the items say of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Parameters {
    pub block_bytes: u64,
    /// All blocks are there from the beginning and stay: a fixed image.
    pub leaves_blocks: bool,
    pub has_parent: bool,
    pub size_bytes: u64,
    pub sector_bytes: u64,
}

impl Parameters {
    /// From the bytes of the items.
    pub(super) fn decode(file: &[u8], size: &[u8], sector: &[u8]) -> Result<Parameters> {
        let fields = || {
            Some((
                u64::from(le::le32(file, 0)?),
                le::le32(file, 4)?,
                le::le64(size, 0)?,
                u64::from(le::le32(sector, 0)?),
            ))
        };
        let (block_bytes, flags, size_bytes, sector_bytes) =
            fields().ok_or_else(|| invalid("a VHDX metadata item is too short"))?;
        if !(MIN_BLOCK_BYTES..=MAX_BLOCK_BYTES).contains(&block_bytes)
            || !block_bytes.is_power_of_two()
        {
            let message = format!("the VHDX image has blocks of {block_bytes} bytes");
            return Err(invalid(message));
        }
        if sector_bytes != 512 && sector_bytes != 4096 {
            let message = format!("the VHDX image has sectors of {sector_bytes} bytes");
            return Err(invalid(message));
        }
        if size_bytes > MAX_SIZE_BYTES {
            let message = "the VHDX image has a disk of more than 64 TiB";
            return Err(invalid(message));
        }
        Ok(Parameters {
            block_bytes,
            leaves_blocks: flags & 1 != 0,
            has_parent: flags & 2 != 0,
            // As in QEMU, a part of a sector at the end is none of the guest's.
            size_bytes: size_bytes - size_bytes % sector_bytes,
            sector_bytes,
        })
    }

    /// The region of an image without a parent: the table, then the items.
    pub(super) fn encode(&self, disk: Guid) -> Vec<u8> {
        let mut bytes = vec![0; TABLE_BYTES];
        le::put(&mut bytes, 0, b"metadata");
        le::put(&mut bytes, 10, &5u16.to_le_bytes());
        let sector = (self.sector_bytes as u32).to_le_bytes();
        let mut file = (self.block_bytes as u32).to_le_bytes().to_vec();
        file.extend(u32::from(self.leaves_blocks).to_le_bytes());
        let both = IS_REQUIRED | IS_VIRTUAL_DISK;
        let items: [(Guid, &[u8], u32); 5] = [
            (Guid::FILE_PARAMETERS, &file, IS_REQUIRED),
            (
                Guid::VIRTUAL_DISK_SIZE,
                &self.size_bytes.to_le_bytes(),
                both,
            ),
            (Guid::VIRTUAL_DISK_ID, &disk.0, both),
            (Guid::LOGICAL_SECTOR_SIZE, &sector, both),
            (Guid::PHYSICAL_SECTOR_SIZE, &sector, both),
        ];
        for (index, (id, item, flags)) in items.into_iter().enumerate() {
            let at = 32 + 32 * index;
            let offset_bytes = bytes.len() as u32;
            le::put(&mut bytes, at, &id.0);
            le::put(&mut bytes, at + 16, &offset_bytes.to_le_bytes());
            le::put(&mut bytes, at + 20, &(item.len() as u32).to_le_bytes());
            le::put(&mut bytes, at + 24, &flags.to_le_bytes());
            bytes.extend_from_slice(item);
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PARAMETERS: Parameters = Parameters {
        block_bytes: 8 << 20,
        leaves_blocks: true,
        has_parent: false,
        size_bytes: 5 << 30,
        sector_bytes: 512,
    };

    fn item(bytes: &[u8], item: Item) -> &[u8] {
        &bytes[item.offset_bytes as usize..][..item.len_bytes as usize]
    }

    #[test]
    fn parameters_go_there_and_back() {
        let bytes = PARAMETERS.encode(Guid::BAT_REGION);
        let items = Items::decode(&bytes, 1 << 20).unwrap();
        let read = Parameters::decode(
            item(&bytes, items.file_parameters),
            item(&bytes, items.virtual_disk_size),
            item(&bytes, items.logical_sector_size),
        );
        assert_eq!(read.unwrap(), PARAMETERS);
        assert_eq!(items.parent_locator, None);
    }

    #[test]
    fn items_outside_of_the_region_and_missing_ones_are_refused() {
        let bytes = PARAMETERS.encode(Guid::BAT_REGION);
        assert!(Items::decode(&bytes, 64 << 10).is_err());
        let mut lacking = bytes.clone();
        lacking[10] = 4;
        let error = Items::decode(&lacking, 1 << 20).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let mut many = bytes;
        many[11] = 8;
        assert!(Items::decode(&many, 1 << 20).is_err());
    }

    #[test]
    fn odd_sizes_are_refused() {
        let decode = |block: u32, size: u64, sector: u32| {
            let mut file = block.to_le_bytes().to_vec();
            file.extend([0; 4]);
            Parameters::decode(&file, &size.to_le_bytes(), &sector.to_le_bytes())
        };
        assert!(decode(1 << 20, 1 << 30, 512).is_ok());
        for (block, size, sector) in [
            (1 << 19, 0, 512),
            (3 << 20, 0, 512),
            (512 << 20, 0, 512),
            (1 << 20, 0, 1024),
            (1 << 20, 65 << 40, 512),
        ] {
            assert!(
                decode(block, size, sector).is_err(),
                "{block} {size} {sector}"
            );
        }
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_value_or_an_error(
            count in any::<u16>(),
            entries in proptest::collection::vec(any::<u8>(), 0..400),
        ) {
            let mut bytes = PARAMETERS.encode(Guid::BAT_REGION);
            le::put(&mut bytes, 10, &count.to_le_bytes());
            le::put(&mut bytes, 32, &entries);
            let _ = Items::decode(&bytes, 1 << 20);
            let _ = Parameters::decode(&entries, &entries, &entries);
        }
    }
}

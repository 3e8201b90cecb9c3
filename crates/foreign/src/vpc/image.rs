//! Reads what an image says of itself.

use std::sync::Arc;

use vellum::{Error, ErrorKind, Result, Storage};

use super::footer::{COOKIE, Footer, Kind, LEN_BYTES, MAX_SECTORS, SizeCalculation};
use super::header::{self, Header, UNALLOCATED};
use super::invalid;
use super::parent::Parent;
use crate::entries::{Endian, Entries};
use crate::fields;

/// `EFBIG`.
pub(super) const FILE_TOO_BIG: i32 = 27;

/// An image without its table.
#[derive(Debug)]
pub(super) struct Image {
    pub file: Arc<dyn Storage>,
    pub footer: Footer,
    pub size_bytes: u64,
    /// `None` for a fixed image.
    pub header: Option<Header>,
    pub parent: Option<Parent>,
}

impl Image {
    pub(super) async fn read(
        file: Arc<dyn Storage>,
        calculation: SizeCalculation,
    ) -> Result<Image> {
        let (footer, is_fixed) = read_footer(&*file).await?;
        if !footer.has_right_checksum() {
            return Err(invalid("Incorrect header checksum"));
        }
        let sectors = footer.sectors(calculation);
        if sectors > MAX_SECTORS {
            let message = "File too large";
            let error = Error::new(ErrorKind::Unsupported, "open", message);
            return Err(error.with_errno(FILE_TOO_BIG));
        }
        let header = match is_fixed {
            true => None,
            false => Some(read_header(&*file, &footer, sectors).await?),
        };
        let parent = match &header {
            Some(header) if footer.kind() == Some(Kind::Differencing) => {
                Some(Parent::read(&*file, header).await?)
            }
            _ => None,
        };
        Ok(Image {
            file,
            footer,
            size_bytes: sectors * 512,
            header,
            parent,
        })
    }
}

impl Image {
    /// Where the header and the ways to the parent end, wherever they stand: no block may be put before that.
    pub(super) fn metadata_end_bytes(&self, header: &Header) -> Result<u64> {
        let file_bytes = self.file.len_bytes()?;
        let header_end_bytes = self.footer.header_bytes() + header::LEN_BYTES as u64;
        let locators = header.locators.iter();
        let ends = locators.filter_map(|locator| locator.end_bytes(file_bytes));
        Ok(ends.fold(header_end_bytes.next_multiple_of(512), u64::max))
    }
}

/// The footer, and whether it is only at the end, as that of a fixed image.
pub(super) async fn read_footer(file: &dyn Storage) -> Result<(Footer, bool)> {
    let first = fields::read_at(file, 0, LEN_BYTES).await?;
    if let Some(footer) = Footer::decode(&first) {
        return Ok((footer, false));
    }
    let Some(at_bytes) = file.len_bytes()?.checked_sub(LEN_BYTES as u64) else {
        return Err(invalid("File too small for a VHD header"));
    };
    let last = fields::read_at(file, at_bytes, LEN_BYTES).await?;
    match Footer::decode(&last) {
        // A dynamic image whose beginning is damaged must not be taken for the bytes of a disk.
        Some(footer) if footer.kind() == Some(Kind::Fixed) => Ok((footer, true)),
        Some(_) => Err(invalid("invalid VPC image")),
        None => Err(invalid("invalid VPC image")),
    }
}

/// Whether there is a footer at an offset.
pub(super) async fn is_footer(file: &dyn Storage, at_bytes: u64) -> Result<bool> {
    let bytes = fields::read_at(file, at_bytes, COOKIE.len()).await?;
    Ok(bytes.starts_with(COOKIE))
}

async fn read_header(file: &dyn Storage, footer: &Footer, sectors: u64) -> Result<Header> {
    let at_bytes = footer.header_bytes();
    if at_bytes > i64::MAX as u64 - header::LEN_BYTES as u64 {
        return Err(invalid("Error reading dynamic VHD header"));
    }
    let bytes = fields::read_at(file, at_bytes, header::LEN_BYTES).await?;
    Header::decode(&bytes, sectors)
}

/// The table, and where the last block ends, in bytes.
pub(super) async fn read_table(file: &dyn Storage, header: &Header) -> Result<(Entries, u64)> {
    let file_bytes = file.len_bytes()?;
    let cut_off = || {
        let message = "block-vpc: free_data_block_offset points after the end of file. \
                       The image has been truncated.";
        invalid(message)
    };
    let table_end = header
        .table_bytes
        .checked_add(u64::from(header.entries) * 4)
        .and_then(|end| end.checked_next_multiple_of(512))
        .filter(|end| *end <= file_bytes)
        .ok_or_else(cut_off)?;
    let count = header.entries as usize;
    let table = Entries::read(file, header.table_bytes, count, Endian::Big).await?;
    let whole_bytes = header.bitmap_bytes() + u64::from(header.block_bytes);
    let places = table.values().iter().filter(|entry| **entry != UNALLOCATED);
    let last = places
        .map(|entry| u64::from(*entry) * 512 + whole_bytes)
        .max();
    let end_bytes = last.unwrap_or(0).max(table_end);
    match end_bytes <= file_bytes {
        true => Ok((table, end_bytes)),
        false => Err(cut_off()),
    }
}

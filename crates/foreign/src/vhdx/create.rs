//! New images.
//!
//! The file identifier is written last, durably after all else: what was cut off is no image.

use std::sync::Arc;

use vellum::{Error, ErrorKind, Result, Storage};
use vellum_storage::ZeroFlags;

use super::bat::{BLOCK_ALIGNMENT_BYTES, Entry, Shape};
use super::guid::Guid;
use super::header::{self, Header};
use super::metadata::{MAX_BLOCK_BYTES, MAX_SIZE_BYTES, MIN_BLOCK_BYTES, Parameters};
use super::region::{self, Region};
use crate::fields;

const MIB: u64 = 1 << 20;
/// Between the table and the first block: the metadata, and room for more.
const GAP_BYTES: u64 = 5 * MIB;
/// Entries are written in pieces of so many.
const ENTRIES_AT_ONCE: u64 = 1 << 17;

/// Which kind of image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Subformat {
    /// Blocks get their places when they are written.
    #[default]
    Dynamic,
    /// The file has room for all blocks from the beginning.
    Fixed,
}

impl Subformat {
    /// From QEMU's name for it.
    pub fn parse(name: &str) -> Option<Subformat> {
        match name {
            "dynamic" => Some(Subformat::Dynamic),
            "fixed" => Some(Subformat::Fixed),
            _ => None,
        }
    }
}

vellum_io::with_setters! {
    /// What a new image is to be.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct CreateOptions {
        /// The virtual size in bytes.
        pub size_bytes: u64,
        /// Of the log, in bytes; 1 MiB if nothing is said.
        pub log_size_bytes: u64,
        /// Of a block, in bytes; 0: by the size of the disk.
        pub block_size_bytes: u64,
        /// Which kind of image.
        pub subformat: Subformat,
        /// Blocks are marked as zeroes, so that they need not be. As QEMU does it, also those of a fixed
        /// image, whose places are given out anew then.
        pub block_state_zero: bool,
        /// Sizes that an image cannot have are refused, not rounded up as `qemu-img` does.
        pub exact_sizes: bool,
    }
}

impl Default for CreateOptions {
    fn default() -> Self {
        CreateOptions {
            size_bytes: 0,
            log_size_bytes: MIB,
            block_size_bytes: 0,
            subformat: Subformat::Dynamic,
            block_state_zero: true,
            exact_sizes: false,
        }
    }
}

impl CreateOptions {
    /// Whether there can be such an image.
    ///
    /// # Errors
    /// As [`create`], where it has not touched the file yet.
    pub fn check(&self) -> Result<()> {
        sizes(self).map(drop)
    }
}

/// The sizes of an image, in bytes.
struct Sizes {
    disk: u64,
    log: u32,
    block: u64,
}

fn sizes(options: &CreateOptions) -> Result<Sizes> {
    let refuse = |message: &str| Err(Error::new(ErrorKind::InvalidArgument, "create", message));
    let round = |bytes: u64, to: u64| match options.exact_sizes {
        true => bytes,
        false => bytes.checked_next_multiple_of(to).unwrap_or(u64::MAX),
    };
    let disk = round(options.size_bytes, 512);
    if disk > MAX_SIZE_BYTES {
        return refuse("Image size too large; max of 64TB");
    }
    let Ok(log) = u32::try_from(round(options.log_size_bytes, MIB)) else {
        return refuse("Log size must be smaller than 4 GB");
    };
    if log == 0 || !u64::from(log).is_multiple_of(MIB) {
        return refuse("Log size must be a multiple of 1 MB");
    }
    let block = match round(options.block_size_bytes, MIB) {
        0 if disk > 32 << 40 => 64 * MIB,
        0 if disk > 100 << 30 => 32 * MIB,
        0 if disk > 1 << 30 => 16 * MIB,
        0 => 8 * MIB,
        block if options.exact_sizes => block,
        block => block.min(MAX_BLOCK_BYTES),
    };
    if !block.is_multiple_of(MIB) {
        return refuse("Block size must be a multiple of 1 MB");
    }
    if !block.is_power_of_two() {
        return refuse("Block size must be a power of two");
    }
    if block > MAX_BLOCK_BYTES {
        return refuse("Block size must not exceed 268435456");
    }
    if !disk.is_multiple_of(512) {
        return refuse("Image size must be a multiple of 512 bytes");
    }
    let sizes = Sizes { disk, log, block };
    if Shape::new(&parameters(&sizes, options)).is_too_large() {
        // QEMU makes such images, which would not be opened here.
        let mib = block / MIB;
        return refuse(&format!(
            "Blocks of {mib} MB are too small for an image of this size: its table would have more \
             than 16 Mi entries"
        ));
    }
    Ok(sizes)
}

fn parameters(sizes: &Sizes, options: &CreateOptions) -> Parameters {
    Parameters {
        block_bytes: sizes.block,
        leaves_blocks: options.subformat == Subformat::Fixed,
        has_parent: false,
        size_bytes: sizes.disk,
        sector_bytes: 512,
    }
}

/// Makes an image in an empty file.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`], in QEMU's words, for sizes that an image cannot have; what the storage says.
pub async fn create(file: &Arc<dyn Storage>, options: &CreateOptions) -> Result<()> {
    let sizes = sizes(options).map_err(|error| error.target(file.name()))?;
    let parameters = parameters(&sizes, options);
    let shape = Shape::new(&parameters);
    // QEMU counts backwards from no blocks, and takes no smaller table than it makes itself.
    let entries = match shape.blocks {
        0 => u64::from(u32::MAX) / shape.chunk_ratio,
        _ => shape.entries,
    };
    let bat = Region {
        offset_bytes: MIB + u64::from(sizes.log),
        len_bytes: (entries * 8).next_multiple_of(MIB) as u32,
    };
    let metadata = Region {
        offset_bytes: bat.offset_bytes + u64::from(bat.len_bytes),
        len_bytes: MIB as u32,
    };
    let data_bytes = metadata.offset_bytes + GAP_BYTES;
    let end_bytes = match options.subformat {
        Subformat::Dynamic => data_bytes,
        // QEMU ends the file with the disk, and takes some such images for cut off then.
        Subformat::Fixed => data_bytes + shape.blocks * sizes.block,
    };
    file.truncate(end_bytes).await?;
    write_table(file, options, &shape, bat, sizes.block, data_bytes).await?;
    write_headers(file, sizes.log).await?;
    let table = region::encode(bat, metadata);
    for at_bytes in region::OFFSETS_BYTES {
        fields::write_at(&**file, at_bytes, &table).await?;
    }
    let items = parameters.encode(Guid::random()?);
    fields::write_at(&**file, metadata.offset_bytes, &items).await?;
    file.flush().await?;
    let identifier = header::file_identifier(concat!("Vellum v", env!("CARGO_PKG_VERSION")));
    fields::write_at(&**file, 0, &identifier).await?;
    file.flush().await
}

async fn write_headers(file: &Arc<dyn Storage>, log_len_bytes: u32) -> Result<()> {
    let mut header = Header {
        sequence: 1,
        file_write: Guid::random()?,
        data_write: Guid::random()?,
        log: Guid::NIL,
        log_version: 0,
        log_len_bytes,
        log_offset_bytes: MIB,
    };
    for at_bytes in header::OFFSETS_BYTES {
        fields::write_at(&**file, at_bytes, &header.encode()).await?;
        header.sequence += 1;
    }
    Ok(())
}

/// Writes the entries of all blocks, unless they are all 0 and the file reads so.
async fn write_table(
    file: &Arc<dyn Storage>,
    options: &CreateOptions,
    shape: &Shape,
    bat: Region,
    block_bytes: u64,
    data_bytes: u64,
) -> Result<()> {
    let is_fixed = options.subformat == Subformat::Fixed;
    if !file.capabilities().has_zero_init {
        let len_bytes = bat.len_bytes.into();
        file.write_zeroes(bat.offset_bytes, len_bytes, ZeroFlags::default())
            .await?;
    }
    if !is_fixed && !options.block_state_zero {
        return Ok(());
    }
    let mut first = 0;
    while first < shape.entries {
        let end = shape.entries.min(first + ENTRIES_AT_ONCE);
        let entries = (first..end).map(|index| match shape.block_of(index) {
            Some(_) if options.block_state_zero => Entry::ZERO.0,
            Some(block) => Entry::fully_present(data_bytes + block * block_bytes).0,
            None => 0,
        });
        let bytes: Vec<u8> = entries.flat_map(u64::to_le_bytes).collect();
        fields::write_at(&**file, bat.offset_bytes + first * 8, &bytes).await?;
        first = end;
    }
    Ok(())
}

const _: () = assert!(MIN_BLOCK_BYTES.is_multiple_of(BLOCK_ALIGNMENT_BYTES));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_an_image_cannot_have_are_refused_in_qemus_words() {
        let options = CreateOptions::default();
        for (options, words) in [
            (
                options.size_bytes(65 << 40),
                "Image size too large; max of 64TB",
            ),
            (
                options.size_bytes(u64::MAX),
                "Image size too large; max of 64TB",
            ),
            (
                options.log_size_bytes(4 << 30),
                "Log size must be smaller than 4 GB",
            ),
            (
                options.log_size_bytes(0),
                "Log size must be a multiple of 1 MB",
            ),
            (
                options.block_size_bytes(3 << 20),
                "Block size must be a power of two",
            ),
        ] {
            let error = sizes(&options).err().expect(words);
            assert_eq!(error.message(), words);
        }
        let exact = options.exact_sizes(true);
        for (options, words) in [
            (
                exact.log_size_bytes(1),
                "Log size must be a multiple of 1 MB",
            ),
            (
                exact.block_size_bytes(1),
                "Block size must be a multiple of 1 MB",
            ),
            (
                exact.block_size_bytes(512 << 20),
                "Block size must not exceed 268435456",
            ),
        ] {
            let error = sizes(&options).err().expect(words);
            assert_eq!(error.message(), words);
        }
        let made = sizes(&options.size_bytes(1).log_size_bytes(1)).unwrap();
        assert_eq!((made.disk, made.log, made.block), (512, 1 << 20, 8 << 20));
        // A table that would not be opened is not made.
        let small = options.block_size_bytes(1 << 20);
        assert!(sizes(&small.size_bytes(15 << 40)).is_ok());
        let error = sizes(&small.size_bytes(20 << 40)).err().expect("a refusal");
        assert!(error.message().starts_with("Blocks of 1 MB are too small"));
        let made = sizes(&options.size_bytes(200 << 30).block_size_bytes(1 << 40)).unwrap();
        assert_eq!(made.block, 256 << 20);
    }
}

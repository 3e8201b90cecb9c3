//! [`CloopLayout`]: every block of a cloop image is compressed.

use std::sync::Arc;

use vellum::{Error, ErrorKind, Result, Storage};
use vellum_io::lane::compute;

use super::Header;
use super::header::{HEADER_BYTES, compressed_bytes};
use crate::fields::{be64, read_at};
use crate::inflate::{Wrapper, inflate};
use crate::{Layout, NewBlock, Place, Run};

/// Offsets are read in pieces of this size to be checked.
const PIECE_BYTES: u64 = 1 << 20;

/// Where the blocks of an image lie.
#[derive(Debug)]
pub struct CloopLayout {
    files: [Arc<dyn Storage>; 1],
    header: Header,
}

/// Checks that the blocks follow one another and that none is too large.
pub(super) async fn check_offsets(file: &dyn Storage, header: &Header) -> Result<()> {
    // Behind the file's end all are zeroes: one of them tells as much as all.
    let there = file.len_bytes()?.saturating_sub(HEADER_BYTES as u64);
    let len_bytes = (header.offsets() * 8).min(there.next_multiple_of(8) + 8);
    let mut at = 0;
    let mut number = 0;
    let mut before = None;
    while at < len_bytes {
        let piece_bytes = PIECE_BYTES.min(len_bytes - at);
        let piece = read_at(file, HEADER_BYTES as u64 + at, piece_bytes as usize).await?;
        for raw in piece.chunks_exact(8) {
            let offset = be64(raw, 0).unwrap_or(0);
            if let Some(before) = before {
                compressed_bytes(number, before, offset)?;
            }
            before = Some(offset);
            number += 1;
        }
        at += piece_bytes;
    }
    Ok(())
}

impl CloopLayout {
    pub(super) fn new(file: Arc<dyn Storage>, header: Header) -> CloopLayout {
        CloopLayout {
            files: [file],
            header,
        }
    }
}

impl Layout for CloopLayout {
    type Changes = ();

    fn format(&self) -> &'static str {
        "cloop"
    }

    fn files(&self) -> &[Arc<dyn Storage>] {
        &self.files
    }

    fn size_bytes(&self) -> u64 {
        self.header.size_bytes()
    }

    fn block_bytes(&self) -> u64 {
        self.header.block_bytes.into()
    }

    fn cluster_size_bytes(&self) -> Option<u64> {
        None
    }

    fn has_backing_files(&self) -> bool {
        false
    }

    fn lookup(&self, _offset_bytes: u64, len_bytes: u64) -> Result<Option<Run>> {
        let place = Place::Compressed;
        Ok(Some(Run { len_bytes, place }))
    }

    async fn inflate(&self, offset_bytes: u64) -> Result<Vec<u8>> {
        let [file] = &self.files;
        let number = offset_bytes / self.block_bytes();
        let offsets = read_at(&**file, HEADER_BYTES as u64 + number * 8, 16).await?;
        let start = be64(&offsets, 0).unwrap_or(0);
        let end = be64(&offsets, 8).unwrap_or(0);
        let len_bytes = compressed_bytes(number + 1, start, end)?;
        let compressed = read_at(&**file, start, len_bytes as usize).await?;
        let block_bytes = self.header.block_bytes as usize;
        let content = compute(move || inflate(&compressed, block_bytes, Wrapper::Zlib)).await;
        content.ok_or_else(|| {
            let message = format!("block {number} does not decompress");
            Error::new(ErrorKind::Corrupt, "read", message)
                .target(file.name())
                .at(offset_bytes)
        })
    }

    async fn allocate(&self, _offset_bytes: u64) -> Result<NewBlock> {
        let message = "images of this format are read only";
        Err(Error::new(ErrorKind::ReadOnly, "write", message))
    }

    fn link(&self, _offset_bytes: u64, _block: NewBlock) -> Result<()> {
        Ok(())
    }

    fn take_changes(&self) -> Option<()> {
        None
    }

    async fn write_changes(&self, _changes: &()) -> Result<()> {
        Ok(())
    }
}

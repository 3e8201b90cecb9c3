//! The sums of what a request writes.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use vellum_format::checksums::{BLOCK_BYTES, DAMAGED, REGION_BYTES, UNKNOWN, sum_of};
use vellum_io::{Buffer, Buffers, Result};

use super::page::{Page, blocks_around};
use super::pages::Checksums;
use crate::qcow2::header::load::read_bytes;

/// The sum of a block of zeroes.
pub(super) static ZERO_SUM: LazyLock<u32> =
    LazyLock::new(|| sum_of([&[0; BLOCK_BYTES as usize][..]]));

/// What a request writes.
pub(super) enum Content<'a> {
    Bytes(&'a Buffers),
    Zeroes,
}

/// The sum that a block has after a change.
#[derive(Debug)]
pub(super) struct NewSum {
    pub(super) sum: u32,
    /// The rest of the block had changed on disk: it must not be vouched for.
    pub(super) is_damaged: bool,
    /// What the block held, and which bytes of it are written; `None`: all of them are.
    part: Option<(Buffer, Range<usize>)>,
}

impl NewSum {
    /// Whether the change is one of a part of a sound block, and `bytes`, found there when it had
    /// failed, have the rest as it was.
    pub(super) fn leaves_the_rest(&self, bytes: &[u8]) -> bool {
        let is_left = |(old, part): &(Buffer, Range<usize>)| {
            bytes.get(..part.start) == old.get(..part.start)
                && bytes.get(part.end..) == old.get(part.end..)
        };
        !self.is_damaged && self.part.as_ref().is_some_and(is_left)
    }
}

/// Goes through buffers from the front.
struct Pieces<'a> {
    buffers: std::slice::Iter<'a, Buffer>,
    rest: &'a [u8],
}

impl<'a> Pieces<'a> {
    /// The next `len_bytes` bytes, piece by piece.
    fn take(&mut self, mut len_bytes: usize) -> impl Iterator<Item = &'a [u8]> {
        std::iter::from_fn(move || {
            while self.rest.is_empty() && len_bytes > 0 {
                self.rest = self.buffers.next()?;
            }
            let (piece, rest) = self.rest.split_at(len_bytes.min(self.rest.len()));
            self.rest = rest;
            len_bytes -= piece.len();
            (!piece.is_empty()).then_some(piece)
        })
    }
}

/// The sums of whole blocks that lie in buffers one behind the other.
pub(super) fn sums_in(buffers: &Buffers) -> impl Iterator<Item = u32> {
    let blocks = vellum_io::buffer::total_len(buffers) / BLOCK_BYTES;
    let mut pieces = Pieces {
        buffers: buffers.iter(),
        rest: &[],
    };
    (0..blocks).map(move |_| sum_of(pieces.take(BLOCK_BYTES as usize)))
}

impl Checksums {
    /// The sums of the blocks around a range once it holds `content`. The caller holds the blocks,
    /// whose pages are `pages`.
    pub(super) async fn sums_after(
        &self,
        range: &Range<u64>,
        content: Content<'_>,
        pages: &[Arc<Page>],
    ) -> Result<Vec<NewSum>> {
        let mut pieces = match &content {
            Content::Bytes(buffers) => Some(Pieces {
                buffers: buffers.iter(),
                rest: &[],
            }),
            Content::Zeroes => None,
        };
        let blocks = blocks_around(range);
        let mut sums = Vec::with_capacity(((blocks.end - blocks.start) / BLOCK_BYTES) as usize);
        for block in blocks.clone().step_by(BLOCK_BYTES as usize) {
            let inside = range.start.max(block) - block..range.end.min(block + BLOCK_BYTES) - block;
            let len_bytes = (inside.end - inside.start) as usize;
            if inside == (0..BLOCK_BYTES) {
                let sum = match pieces.as_mut() {
                    Some(pieces) => sum_of(pieces.take(len_bytes)),
                    None => *ZERO_SUM,
                };
                sums.push(NewSum {
                    sum,
                    is_damaged: false,
                    part: None,
                });
                continue;
            }
            let old = read_bytes(&self.file, block, BLOCK_BYTES).await?;
            let known = page_of(pages, block).sum(block);
            let is_damaged = known != UNKNOWN && sum_of([&old[..]]) != known;
            let mut new = old.to_vec();
            let changed = inside.start as usize..inside.end as usize;
            let part = &mut new[changed.clone()];
            match pieces.as_mut() {
                None => part.fill(0),
                Some(pieces) => {
                    let mut at = 0;
                    for piece in pieces.take(len_bytes) {
                        part[at..at + piece.len()].copy_from_slice(piece);
                        at += piece.len();
                    }
                }
            }
            let sum = match is_damaged {
                true => DAMAGED,
                false => sum_of([&new[..]]),
            };
            sums.push(NewSum {
                sum,
                is_damaged,
                part: Some((old, changed)),
            });
        }
        Ok(sums)
    }
}

/// The page of a block among those of a range, which lie one behind the other.
pub(super) fn page_of(pages: &[Arc<Page>], block_bytes: u64) -> &Page {
    let region = block_bytes / REGION_BYTES;
    &pages[(region - pages[0].region) as usize]
}

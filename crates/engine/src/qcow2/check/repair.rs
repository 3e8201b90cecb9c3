//! Makes the refcounts of an image that was not closed cleanly right again.
//!
//! Order, so that a crash at any point leaves leaked clusters at worst and the
//! dirty bit set: counts go up and new refcount blocks are written; barrier; the
//! refcount table learns of the new blocks; barrier; counts go down; copied flags
//! are put right; barrier; the dirty bit is cleared.

use std::collections::BTreeMap;
use std::sync::Arc;

use vellum_format::HostOffset;
use vellum_format::features::Incompatible;
use vellum_format::header::field;
use vellum_format::refcount::{self, RefcountTableEntry};
use vellum_storage::WriteFlags;

use super::counts::Counts;
use super::stored::Stored;
use super::{CheckReport, Findings, Image, Outcome, copied};
use crate::{Buffer, Buffers, Error, ErrorKind, Result, Storage};

/// Puts refcounts and copied flags right and clears the dirty bit.
///
/// # Errors
/// [`ErrorKind::Corrupt`] if more is wrong than refcounts; nothing is written then.
pub(crate) async fn repair_refcounts(storage: Arc<dyn Storage>) -> Result<()> {
    let image = Image::open(storage).await?;
    let mut findings = Findings {
        report: CheckReport::default(),
        sink: None,
    };
    let outcome = Outcome::new(&image, &mut findings).await?;
    if findings.report.corruptions > 0 || !outcome.stored.all_readable() {
        return Err(cannot_repair(&image, "more than its refcounts is damaged"));
    }
    let repair = Repair::plan(&image, outcome)?;
    repair.write_counts(Pass::Raise).await?;
    image.storage.flush().await?;
    if repair.write_table_entries().await? {
        image.storage.flush().await?;
    }
    repair.write_counts(Pass::Lower).await?;
    repair_copied_flags(image.storage.clone()).await?;
    image.storage.flush().await?;
    clear_dirty_bit(&image).await?;
    image.storage.flush().await
}

fn cannot_repair(image: &Image, why: &str) -> Error {
    let message = format!("Could not repair dirty image: {why}");
    Error::new(ErrorKind::Corrupt, "open", message).target(image.storage.name())
}

/// Puts the copied flags right by what is on disk now: the file may have grown.
async fn repair_copied_flags(storage: Arc<dyn Storage>) -> Result<()> {
    let image = Image::open(storage).await?;
    let stored = Stored::load(&image).await?;
    copied::repair(&image, &stored).await
}

async fn clear_dirty_bit(image: &Image) -> Result<()> {
    let bits = image
        .header
        .incompatible
        .without(Incompatible::DIRTY)
        .bits();
    write(
        image,
        field::INCOMPATIBLE_FEATURES as u64,
        Buffer::copy_of(&bits.to_be_bytes()),
    )
    .await
}

async fn write(image: &Image, offset: u64, buffer: Buffer) -> Result<()> {
    image
        .storage
        .write(offset, Buffers::from_buf([buffer]), WriteFlags::default())
        .await?;
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// No count gets smaller.
    Raise,
    /// Every count becomes exact.
    Lower,
}

/// A refcount block that there is, or is to be.
#[derive(Clone, Copy)]
struct Block {
    offset: u64,
    is_new: bool,
}

struct Repair<'a> {
    image: &'a Image,
    stored: Stored,
    references: Counts,
    blocks: BTreeMap<u64, Block>,
}

impl<'a> Repair<'a> {
    /// Finds a block for every cluster that is referred to. Missing blocks are put
    /// behind the end of the file, where they need counts too.
    fn plan(image: &'a Image, outcome: Outcome) -> Result<Self> {
        let mut repair = Repair {
            image,
            blocks: BTreeMap::new(),
            stored: outcome.stored,
            references: outcome.references,
        };
        for (number, entry) in repair.stored.entries() {
            repair.blocks.insert(
                number,
                Block {
                    offset: entry.raw_offset(),
                    is_new: false,
                },
            );
        }
        let per_block = image.geometry.refcount_block_entries();
        let table_entries = u64::from(image.header.refcount_table_clusters)
            * image.geometry.table_entries_per_cluster();
        let mut end = outcome.clusters;
        let mut cluster = 0;
        while cluster < end {
            let number = cluster / per_block;
            if repair.blocks.contains_key(&number) {
                cluster = (number + 1) * per_block;
                continue;
            }
            if repair.references.get(cluster) > 0 {
                if number >= table_entries {
                    return Err(cannot_repair(image, "its refcount table is too small"));
                }
                let offset = end << image.geometry.cluster_bits;
                repair.blocks.insert(
                    number,
                    Block {
                        offset,
                        is_new: true,
                    },
                );
                repair.references.set(end, 1);
                end += 1;
            }
            cluster += 1;
        }
        Ok(repair)
    }

    /// Writes the blocks that this pass changes.
    async fn write_counts(&self, pass: Pass) -> Result<()> {
        let geometry = &self.image.geometry;
        let per_block = geometry.refcount_block_entries();
        for (&number, block) in &self.blocks {
            let mut bytes = Buffer::zeroed(geometry.cluster_size_bytes() as usize);
            let mut changed = block.is_new && pass == Pass::Raise;
            for index in 0..per_block {
                let cluster = number * per_block + index;
                let reference = self.references.get(cluster);
                let stored = self.stored.counts().get(cluster);
                let count = match pass {
                    Pass::Raise => reference.max(stored),
                    Pass::Lower => reference,
                };
                changed |= match pass {
                    Pass::Raise => stored < reference,
                    Pass::Lower => stored > reference,
                };
                if count != 0
                    && !refcount::set(&mut bytes, geometry.refcount_order, index as usize, count)
                {
                    return Err(cannot_repair(
                        self.image,
                        "a refcount does not fit its width",
                    ));
                }
            }
            if changed {
                write(self.image, block.offset, bytes).await?;
            }
        }
        Ok(())
    }

    /// Enters new blocks into the refcount table; says whether there are any.
    async fn write_table_entries(&self) -> Result<bool> {
        let new = self.blocks.iter().filter(|(_, block)| block.is_new);
        let mut any = false;
        for (&number, block) in new {
            let entry = RefcountTableEntry::new(HostOffset(block.offset));
            let at = self.image.header.refcount_table_offset.0 + number * 8;
            write(self.image, at, Buffer::copy_of(&entry.0.to_be_bytes())).await?;
            any = true;
        }
        Ok(any)
    }
}

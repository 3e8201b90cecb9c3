//! Makes all refcounts anew, where too much of them is broken.
//!
//! New refcount blocks and a new refcount table are written to places that are free
//! or behind the end of the file. Barrier; one write to the header makes them the
//! image's; barrier. A crash before it leaves the old image, one after it an image
//! in which the old refcounts are leaked.

use std::collections::BTreeMap;

use vellum_format::header::{encode_refcount_table, field};
use vellum_format::refcount::{self, RefcountTableEntry};
use vellum_format::{HostOffset, limits};
use vellum_io::finish_all;

use super::outcome::Outcome;
use super::place::Places;
use super::source::Image;
use crate::{Buffer, Error, ErrorKind, Result};

/// Blocks that are written at a time, in bytes.
const WRITE_BYTES: u64 = 8 << 20;
/// Entries of the longest refcount table.
const MOST_BLOCKS: u64 = limits::MAX_REFCOUNT_TABLE_SIZE_BYTES / 8;
const EFBIG: i32 = 27;

/// Where the new refcounts will lie.
struct Plan {
    /// The cluster of each refcount block, by its number.
    blocks: BTreeMap<u64, u64>,
    table: u64,
    table_clusters: u64,
}

/// Writes refcounts that are the references of `outcome`, and takes them into use.
/// The image must be read anew afterwards.
pub(super) async fn rebuild(image: &Image, outcome: &mut Outcome) -> Result<()> {
    cover_entries_beyond(image, outcome).await?;
    let plan = plan(image, outcome)?;
    write_blocks(image, outcome, &plan).await?;
    write_table(image, &plan).await?;
    image.flush().await?;
    let table = HostOffset(image.offset_of(plan.table));
    let fields = encode_refcount_table(table, plan.table_clusters as u32);
    image
        .write(
            field::REFCOUNT_TABLE_OFFSET as u64,
            Buffer::copy_of(&fields),
        )
        .await?;
    image.flush().await
}

/// Makes the file so long that what points behind its end has clusters there, and counts
/// these: they would be the next to be handed out.
async fn cover_entries_beyond(image: &Image, outcome: &mut Outcome) -> Result<()> {
    let most = image.cluster_of(image.longest_bytes());
    let Some(last) = outcome.tally.last_beyond(most) else {
        return Ok(());
    };
    image.storage.truncate(image.offset_of(last + 1)).await?;
    outcome.tally.grow(last + 1);
    Ok(())
}

/// Every block lies in the clusters that it counts, or behind them; so each is placed
/// before the ranges that it may add to.
fn plan(image: &Image, outcome: &mut Outcome) -> Result<Plan> {
    let geometry = &image.geometry;
    let per_block = geometry.refcount_block_entries();
    let per_cluster = geometry.table_entries_per_cluster();
    let mut places = Places::new(image);
    let mut blocks = BTreeMap::new();
    place_blocks(&mut places, outcome, per_block, &mut blocks)?;
    let entries =
        |blocks: &BTreeMap<u64, u64>| blocks.keys().next_back().map_or(0, |last| last + 1);
    let mut table_clusters = entries(&blocks).div_ceil(per_cluster).max(1);
    // Where there is a block already, or else at the end of the file.
    let mut low = Places::new(image);
    let counted = |cluster| blocks.contains_key(&(cluster / per_block));
    let mut table = low.take(outcome, 0, table_clusters, counted)?;
    loop {
        place_blocks(&mut places, outcome, per_block, &mut blocks)?;
        let needed = entries(&blocks).div_ceil(per_cluster);
        if needed <= table_clusters {
            break;
        }
        for cluster in table..table + table_clusters {
            outcome.tally.references.set(cluster, 0);
        }
        table_clusters = needed;
        let mut end = Places::new(image);
        table = end.take(outcome, u64::MAX, table_clusters, |_| false)?;
    }
    if table_clusters * geometry.cluster_size_bytes() > limits::MAX_REFCOUNT_TABLE_SIZE_BYTES {
        return Err(too_large());
    }
    Ok(Plan {
        blocks,
        table,
        table_clusters,
    })
}

fn too_large() -> Error {
    let message = "the refcount table would be too large";
    Error::new(ErrorKind::Unsupported, "check", message).with_errno(EFBIG)
}

/// Gives a block to every range of clusters that needs one and has none.
fn place_blocks(
    places: &mut Places,
    outcome: &mut Outcome,
    per_block: u64,
    blocks: &mut BTreeMap<u64, u64>,
) -> Result<()> {
    let mut number = 0;
    while number * per_block < outcome.tally.clusters {
        let range = number * per_block..(number + 1) * per_block;
        if !blocks.contains_key(&number) && outcome.tally.references.any_in(range.clone()) {
            let cluster = places.take(outcome, range.start, 1, |_| true)?;
            blocks.insert(number, cluster);
            if blocks.len() as u64 > MOST_BLOCKS {
                return Err(too_large());
            }
        }
        number += 1;
    }
    Ok(())
}

async fn write_blocks(image: &Image, outcome: &Outcome, plan: &Plan) -> Result<()> {
    let geometry = &image.geometry;
    let per_block = geometry.refcount_block_entries();
    let at_once = (WRITE_BYTES / geometry.cluster_size_bytes()).clamp(1, 128);
    let writes = plan.blocks.iter().map(|(&number, &cluster)| async move {
        let mut bytes = Buffer::zeroed(geometry.cluster_size_bytes() as usize);
        for index in 0..per_block {
            let count = outcome.tally.references.get(number * per_block + index);
            // Counts are kept within their width.
            let fits = count == 0
                || refcount::set(&mut bytes, geometry.refcount_order, index as usize, count);
            debug_assert!(fits, "a count of {count}");
        }
        image.write(image.offset_of(cluster), bytes).await
    });
    finish_all(at_once as usize, writes).await.map(drop)
}

async fn write_table(image: &Image, plan: &Plan) -> Result<()> {
    let len_bytes = plan.table_clusters * image.geometry.cluster_size_bytes();
    let mut bytes = Buffer::zeroed(len_bytes as usize);
    for (&number, &cluster) in &plan.blocks {
        let entry = RefcountTableEntry::new(HostOffset(image.offset_of(cluster)));
        let fits = entry.write(&mut bytes, number as usize);
        debug_assert!(fits, "refcount block {number}");
    }
    image.write(image.offset_of(plan.table), bytes).await
}

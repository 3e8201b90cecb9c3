//! How much of what a disk refers to lies beyond the end of its file, which was cut off: by a copy
//! that broke, a disk that was full, `head -c`. The guest reads zeroes there.
//!
//! A cluster counts as missing only if none of it is in the file: programs leave the last one
//! short. Of a compressed one all sectors are there but for a part of the last. A cluster that reads as zeroes by its entry misses nothing.
//!
//! Tables are read only if refcounts speak of clusters beyond the end, which is rare: a crash may have
//! left them so.
//!
//! Once the file has grown again, missing clusters look like holes. So an open for writing that
//! finds some sets a compatible feature bit ([`WAS_CUT_SHORT`], FORMAT.md, section 7e), which
//! checks tell of and a full repair clears.
//!
//! [`WAS_CUT_SHORT`]: Compatible::WAS_CUT_SHORT

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use vellum_format::features::{Compatible, Incompatible};
use vellum_format::limits::COMPRESSED_SECTOR_BYTES;
use vellum_format::refcount;
use vellum_format::{Header, L1Entry, L2Entry, Mapping};

use super::source::Image;
use super::tables::for_each_table;
use crate::qcow2::header::fields::write_compatible;
use crate::qcow2::header::load;
use crate::{Result, Storage};

/// Refcount blocks that are read at most to learn whether tables have to be.
const MOST_BLOCKS: usize = 16;
/// Looks at an image that grows meanwhile.
const MOST_LOOKS: usize = 5;

/// What an image refers to in its file that was cut short. See [`cut_short`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CutShort {
    /// Bytes of data clusters, compressed clusters and L2 tables that it refers to.
    pub referenced_bytes: u64,
    /// Those of them that lie beyond the end of the file, in whole clusters.
    pub missing_bytes: u64,
    /// L2 tables among them. What they map is not known, and not counted.
    pub missing_tables: u64,
}

impl CutShort {
    /// Adds the data that a mapping leads to.
    fn add_data_of(&mut self, mapping: Mapping, cluster_bytes: u64, end_of_file: u64) {
        let missing_bytes = match mapping {
            Mapping::Zero { .. } | Mapping::Subclusters { allocated: 0, .. } => return,
            Mapping::Compressed(data) => {
                self.referenced_bytes += data.max_len_bytes();
                // The file may end inside the last sector.
                let end = end_of_file.next_multiple_of(COMPRESSED_SECTOR_BYTES);
                data.end()
                    .bytes()
                    .saturating_sub(end.max(data.host_offset.bytes()))
            }
            other => {
                let Some(host) = other.host() else {
                    return;
                };
                self.referenced_bytes += cluster_bytes;
                match host.bytes() >= end_of_file {
                    true => cluster_bytes,
                    false => 0,
                }
            }
        };
        self.missing_bytes += missing_bytes;
    }
}

impl fmt::Display for CutShort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (missing, referenced) = (self.missing_bytes, self.referenced_bytes);
        let or_more = if self.missing_tables > 0 {
            "at least "
        } else {
            ""
        };
        let what = "referenced bytes are missing";
        write!(
            f,
            "the file is cut short: {or_more}{missing} of {referenced} {what}"
        )
    }
}

/// Looks whether the image in `storage` refers to what lies beyond the end of its file, for its disk or a
/// snapshot; the data of an image with an external data file is left out. Reads tables and writes nothing.
/// Others may write to the image meanwhile.
///
/// # Errors
/// If the header is refused, a read fails, or the tables overlap so much that reading them would
/// take for ever.
pub async fn cut_short(storage: Arc<dyn Storage>) -> Result<Option<CutShort>> {
    for _ in 0..MOST_LOOKS {
        let image = Image::open(storage.clone(), None).await?;
        let is_dirty = image.header.incompatible.contains(Incompatible::DIRTY);
        let ends_inside = !image.geometry.is_cluster_aligned(image.len_bytes());
        let (header, end_of_file) = (&image.header, image.len_bytes());
        if !is_dirty && !ends_inside && !counts_beyond_end(&storage, header, end_of_file).await? {
            return Ok(None);
        }
        let found = look_at_tables(&image).await?;
        if found.missing_bytes == 0 {
            return Ok(None);
        }
        // Whoever writes to it makes the file longer first, and then refers to what is new.
        if storage.len_bytes()? == image.len_bytes() {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

async fn look_at_tables(image: &Image) -> Result<CutShort> {
    let (geometry, end_of_file) = (image.geometry, image.len_bytes());
    let cluster_bytes = geometry.cluster_size_bytes();
    let mut found = CutShort::default();
    let mut tables = BTreeSet::new();
    for (offset, entries) in l1_tables(image).await? {
        let l1_bytes = u64::from(entries) * 8;
        image.spend(l1_bytes)?;
        let l1_end = offset.saturating_add(l1_bytes);
        let missing_bytes = l1_end.saturating_sub(end_of_file.max(offset));
        found.referenced_bytes += missing_bytes;
        found.missing_bytes += missing_bytes;
        found.missing_tables += u64::from(missing_bytes > 0);
        let l1 = load::read_bytes(&image.storage, offset, l1_bytes).await?;
        let entries = (0..l1.len() / 8).filter_map(|index| L1Entry::read(&l1, index));
        let entries = entries.filter_map(|entry| entry.decode(&geometry).ok()?);
        tables.extend(entries.map(|table| table.bytes()));
    }
    let is_there = |table: &u64| *table < end_of_file;
    let (tables, missing): (Vec<u64>, Vec<u64>) = tables.into_iter().partition(is_there);
    found.missing_tables += missing.len() as u64;
    found.missing_bytes += missing.len() as u64 * cluster_bytes;
    found.referenced_bytes += (tables.len() + missing.len()) as u64 * cluster_bytes;
    if geometry.external_data {
        return Ok(found);
    }
    image.spend(tables.len() as u64 * cluster_bytes)?;
    for_each_table(image, &tables, cluster_bytes, |_, table| {
        let entries = (0..geometry.l2_entries() as usize)
            .map_while(|index| L2Entry::read(table, index, &geometry))
            .filter(|entry| *entry != L2Entry::UNALLOCATED);
        for mapping in entries.filter_map(|entry| entry.decode(&geometry).ok()) {
            found.add_data_of(mapping, cluster_bytes, end_of_file);
        }
        Ok(())
    })
    .await?;
    Ok(found)
}

/// Offsets and lengths of the L1 tables of the disk and its snapshots.
async fn l1_tables(image: &Image) -> Result<Vec<(u64, u32)>> {
    let header = &image.header;
    let mut all = vec![(header.l1_table_offset.bytes(), header.l1_entries)];
    // A list that is damaged is the check's affair.
    if let Ok(snapshots) = load::snapshots(&image.storage, header).await {
        let sound = snapshots
            .entries
            .iter()
            .filter(|entry| entry.check_l1_table(&image.geometry).is_ok());
        all.extend(sound.map(|entry| (entry.l1_table_offset.bytes(), entry.l1_entries)));
    }
    Ok(all)
}

/// Whether refcounts speak of clusters beyond the end of the file, or lie there themselves; too many to be
/// read may do so.
async fn counts_beyond_end(
    storage: &Arc<dyn Storage>,
    header: &Header,
    end_of_file: u64,
) -> Result<bool> {
    let l1_bytes = u64::from(header.l1_entries) * 8;
    let l1_end = header.l1_table_offset.bytes().saturating_add(l1_bytes);
    if l1_end > end_of_file || header.refcount_table_offset.bytes() >= end_of_file {
        return Ok(true);
    }
    let geometry = header.geometry();
    let end = geometry.clusters_for(end_of_file);
    let per_block = geometry.refcount_block_entries();
    let entries = load::refcount_table(storage, header, &geometry).await?;
    let beyond = (0u64..).zip(entries).filter(|(number, entry)| {
        let block_end = number.saturating_add(1).saturating_mul(per_block);
        entry.raw_offset() != 0 && block_end > end
    });
    for (read, (number, entry)) in beyond.enumerate() {
        if entry.raw_offset() >= end_of_file || read == MOST_BLOCKS {
            return Ok(true);
        }
        let len_bytes = geometry.cluster_size_bytes();
        let counts = load::read_bytes(storage, entry.raw_offset(), len_bytes).await?;
        let first = end.saturating_sub(number * per_block);
        let mut beyond = first..per_block;
        if beyond.any(|index| refcount::get(&counts, geometry.refcount_order, index as usize) > 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Has the header tell, durably and before the file grows, that it was cut short, if it was. What cannot be
/// read is left to its use to meet.
///
/// # Errors
/// If the header cannot be written.
pub(in crate::qcow2) async fn note_if_cut_short(
    file: &Arc<dyn Storage>,
    header: &mut Header,
) -> Result<()> {
    let is_noted = header.compatible.contains(Compatible::WAS_CUT_SHORT);
    if header.version < 3 || is_noted || !file.capabilities().growable {
        return Ok(());
    }
    // Of most images that is all that is read. The counts of a dirty one are out of date.
    let end_of_file = file.len_bytes()?;
    let is_dirty = header.incompatible.contains(Incompatible::DIRTY);
    if !is_dirty && !matches!(counts_beyond_end(file, header, end_of_file).await, Ok(true)) {
        return Ok(());
    }
    let Ok(Some(_)) = cut_short(file.clone()).await else {
        return Ok(());
    };
    header.compatible = header.compatible.with(Compatible::WAS_CUT_SHORT);
    write_compatible(&**file, header.compatible).await?;
    file.flush().await
}

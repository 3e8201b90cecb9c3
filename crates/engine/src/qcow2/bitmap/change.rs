//! Adding, removing, clearing, switching and merging bitmaps of an open image.
//!
//! Each change waits until no request runs, makes durable what was written before, and
//! takes effect at one moment, also for a crash: a bitmap cleared holds exactly what is
//! written afterwards.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::bitmap::{BitmapDirectoryEntry, BitmapFlags};
use vellum_format::limits;
use vellum_format::types::HostOffset;
use vellum_io::{Error, ErrorKind, Result};

use super::api::{BitmapOptions, NewBitmap};
use super::crash_consistent::is_consistent;
use super::dirty::Dirty;
use super::state::{Table, Tracked};
use super::store::NewClusters;
use super::track::{entries_for, point_at};
use crate::qcow2::image::Image;
use vellum_io::range_lock::{Mode, RangeGuard};

const DEFAULT_GRANULARITY_BYTES: (u64, u64) = (4096, 65536);
const EINVAL: i32 = 22;

/// No request runs, and everything written is durable.
pub(super) struct Quiet<'a> {
    pub(super) layout: async_lock::MutexGuard<'a, Vec<Table>>,
    _all: RangeGuard,
    _one: async_lock::MutexGuard<'a, ()>,
}

fn refuse(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "bitmap", message).with_errno(EINVAL)
}

fn find(entries: &[BitmapDirectoryEntry], name: &str) -> Result<usize> {
    let found = entries
        .iter()
        .position(|entry| entry.name == name.as_bytes());
    found.ok_or_else(|| refuse(format!("Dirty bitmap '{name}' not found")))
}

/// Refuses a bitmap whose content is lost, in QEMU's words.
pub(super) fn inconsistent(name: &str) -> Error {
    refuse(format!(
        "Bitmap '{name}' is inconsistent and cannot be used"
    ))
}

/// Adds what `source` calls dirty.
fn merge_into(dirty: &mut Dirty, source: &Dirty) -> Result<()> {
    if source.size_bytes() != dirty.size_bytes() {
        return Err(refuse(format!(
            "Bitmaps are of different sizes (destination size is {}, source size is {}) and can't \
             be merged",
            dirty.size_bytes(),
            source.size_bytes()
        )));
    }
    dirty.merge(source);
    Ok(())
}

impl Image {
    pub(super) async fn quiesce(self: &Arc<Self>) -> Result<Quiet<'_>> {
        self.begin_change("bitmap").await?;
        let one = self.resizing.lock().await;
        let all = self
            .guest_ranges
            .acquire(0..u64::MAX, Mode::Exclusive)
            .await;
        self.write_back_locked_range(0..self.size_bytes()).await?;
        self.commit().await?;
        Ok(Quiet {
            layout: self.bitmaps.layout.lock().await,
            _all: all,
            _one: one,
        })
    }

    /// The bitmap `name` and its place in the directory.
    pub(super) async fn consistent_bitmap(
        &self,
        name: &str,
    ) -> Result<(Vec<BitmapDirectoryEntry>, usize)> {
        let entries = self.bitmap_entries().await?;
        let index = find(&entries, name)?;
        match is_consistent(&self.header(), &entries[index]) {
            true => Ok((entries, index)),
            false => Err(inconsistent(name)),
        }
    }

    /// Adds bitmaps, all or none, with one new directory: so nothing is allocated that is not
    /// used afterwards.
    pub(super) async fn add_bitmaps(self: &Arc<Self>, added: Vec<NewBitmap>) -> Result<()> {
        let mut quiet = self.quiesce().await?;
        let old_entries = self.bitmap_entries().await?;
        let mut entries = old_entries.clone();
        let mut contents = Vec::with_capacity(added.len());
        for bitmap in &added {
            let granularity_bits = self.check_new(&entries, &bitmap.name, &bitmap.options)?;
            let mut dirty = Dirty::new(granularity_bits, self.size_bytes());
            if let Some(content) = &bitmap.content {
                merge_into(&mut dirty, &content.dirty)?;
            }
            entries.push(BitmapDirectoryEntry {
                table_offset: HostOffset::ZERO,
                table_entries: 0,
                flags: match bitmap.options.disabled {
                    true => BitmapFlags::default(),
                    false => BitmapFlags::AUTO.with(BitmapFlags::IN_USE),
                },
                granularity_bits,
                name: bitmap.name.as_bytes().to_vec(),
            });
            contents.push(dirty);
        }
        let mut new = NewClusters::default();
        let mut tables = Vec::with_capacity(added.len());
        for (entry, dirty) in entries[old_entries.len()..].iter_mut().zip(&contents) {
            let table = self.store_bits(dirty, &mut new).await?;
            point_at(entry, &table);
            tables.push(table);
        }
        if added.iter().any(|bitmap| !bitmap.options.disabled) {
            let marked = self.set_crash_consistent(&old_entries).await;
            if let Err(error) = marked {
                self.give_back_new(new).await;
                return Err(error);
            }
        }
        self.replace_directory(&entries, new).await?;
        for ((bitmap, dirty), table) in added.iter().zip(contents).zip(tables) {
            if !bitmap.options.disabled {
                self.begin_one(&mut quiet, &bitmap.name, dirty, table);
            }
        }
        Ok(())
    }

    /// Records writes in one more bitmap.
    fn begin_one(&self, quiet: &mut Quiet<'_>, name: &str, dirty: Dirty, table: Table) {
        let name = name.as_bytes().to_vec();
        let tracked = Tracked::new(name, dirty);
        self.bitmaps.live().bitmaps.push(tracked);
        quiet.layout.push(table);
        drop(self.bitmaps.uncover(self.size_bytes()));
    }

    /// Records no more writes in a bitmap; gives its exact bits and where they lie, if
    /// it was recording.
    fn end_one(&self, quiet: &mut Quiet<'_>, name: &str) -> Option<(Dirty, Table)> {
        let number = self.number_of_tracked(name)?;
        let tracked = self.bitmaps.live().bitmaps.remove(number);
        let table = quiet.layout.remove(number);
        drop(self.bitmaps.uncover(self.size_bytes()));
        Some((tracked.dirty, table))
    }

    fn check_new(
        &self,
        entries: &[BitmapDirectoryEntry],
        name: &str,
        options: &BitmapOptions,
    ) -> Result<u8> {
        if name.is_empty() {
            return Err(refuse("Bitmap name cannot be empty"));
        }
        let (least, most) = DEFAULT_GRANULARITY_BYTES;
        let default = self.geometry.cluster_size_bytes().clamp(least, most);
        let granularity = options.granularity_bytes.unwrap_or(default);
        if granularity < 512 || !granularity.is_power_of_two() {
            return Err(refuse("Granularity must be power of 2 and at least 512"));
        }
        if find(entries, name).is_ok() {
            return Err(refuse(format!("Bitmap already exists: {name}")));
        }
        let cannot = |why: String| {
            refuse(format!(
                "Can't make bitmap '{name}' persistent in '{}': {why}",
                options.node_name.as_deref().unwrap_or(&self.name)
            ))
        };
        if self.geometry.version < 3 {
            let why = "Cannot store dirty bitmaps in qcow2 v2 files";
            return Err(cannot(why.to_owned()));
        }
        // QEMU opens no image with a bitmap whose table is empty.
        if self.size_bytes() == 0 {
            return Err(cannot("The disk has no length".to_owned()));
        }
        let granularity_bits = granularity.trailing_zeros() as u8;
        if granularity_bits > limits::MAX_BITMAP_GRANULARITY_BITS {
            let most = 1u64 << limits::MAX_BITMAP_GRANULARITY_BITS;
            return Err(cannot(format!(
                "Granularity exceeds maximum ({most} bytes)"
            )));
        }
        let longest = limits::MAX_BITMAP_NAME_LEN_BYTES;
        if name.len() > longest.into() {
            return Err(cannot(format!(
                "Name length exceeds maximum ({longest} characters)"
            )));
        }
        let dirty = Dirty::new(granularity_bits, self.size_bytes());
        let table_entries = entries_for(self, &dirty);
        let data_bytes = table_entries.saturating_mul(self.geometry.cluster_size_bytes());
        if table_entries > limits::MAX_BITMAP_TABLE_ENTRIES.into()
            || data_bytes > limits::MAX_BITMAP_DATA_SIZE_BYTES
        {
            let why = "Too much space will be occupied by the bitmap. Use larger granularity";
            return Err(cannot(why.to_owned()));
        }
        if entries.len() >= limits::MAX_BITMAPS as usize {
            let why = "Maximum number of persistent bitmaps is already reached";
            return Err(cannot(why.to_owned()));
        }
        let directory: usize = entries
            .iter()
            .map(|entry| entry.name.len())
            .chain([name.len()])
            .map(|bytes| (24 + bytes).next_multiple_of(8))
            .sum();
        if directory as u64 > limits::MAX_BITMAP_DIRECTORY_SIZE_BYTES {
            return Err(cannot(
                "Not enough space in the bitmap directory".to_owned(),
            ));
        }
        Ok(granularity_bits)
    }

    /// Removes all bitmaps.
    pub(crate) async fn remove_all_bitmaps(self: &Arc<Self>) -> Result<()> {
        if self.header().bitmaps().is_none() {
            return Ok(());
        }
        for entry in self.bitmap_entries().await? {
            self.remove_bitmap(&entry.name_text()).await?;
        }
        Ok(())
    }

    pub(super) async fn remove_bitmap(self: &Arc<Self>, name: &str) -> Result<()> {
        let mut quiet = self.quiesce().await?;
        let mut entries = self.bitmap_entries().await?;
        let removed = entries.remove(find(&entries, name)?);
        // What a table leads to that cannot be read is leaked.
        let table = self.load_bitmap(&removed, 0).await;
        self.replace_directory(&entries, NewClusters::default())
            .await?;
        let tracked = self.end_one(&mut quiet, name).map(|(_, table)| table);
        if let Some(table) = tracked.or(table.ok().map(|(_, table)| table)) {
            self.drop_table_of_bitmap(&table);
        }
        Ok(())
    }

    /// Gives a bitmap other bits, at one moment.
    async fn replace_bits(&self, quiet: &mut Quiet<'_>, name: &str, dirty: Dirty) -> Result<()> {
        let (mut entries, index) = self.consistent_bitmap(name).await?;
        let old = self.load_bitmap(&entries[index], 0).await?.1;
        let mut new = NewClusters::default();
        let table = self.store_bits(&dirty, &mut new).await?;
        point_at(&mut entries[index], &table);
        self.replace_directory(&entries, new).await?;
        let old = match self.end_one(quiet, name) {
            Some((_, old)) => {
                self.begin_one(quiet, name, dirty, table);
                old
            }
            None => old,
        };
        self.drop_table_of_bitmap(&old);
        Ok(())
    }

    /// Has a bitmap call some ranges dirty, and nothing else.
    pub(super) async fn set_bitmap(
        self: &Arc<Self>,
        name: &str,
        ranges: &[Range<u64>],
    ) -> Result<()> {
        let mut quiet = self.quiesce().await?;
        let dirty = self.dirty_ranges(name, ranges).await?;
        self.replace_bits(&mut quiet, name, dirty).await
    }

    /// The bits of a bitmap that calls some ranges dirty, and nothing else.
    async fn dirty_ranges(&self, name: &str, ranges: &[Range<u64>]) -> Result<Dirty> {
        let (entries, index) = self.consistent_bitmap(name).await?;
        let mut dirty = Dirty::new(entries[index].granularity_bits, self.size_bytes());
        for range in ranges {
            dirty.mark(range);
        }
        Ok(dirty)
    }

    /// As [`Image::set_bitmap`], but what an enabled bitmap called dirty stays so on disk
    /// until the close.
    pub(super) async fn set_bitmap_after_backup(
        self: &Arc<Self>,
        name: &str,
        ranges: &[Range<u64>],
    ) -> Result<()> {
        let mut quiet = self.quiesce().await?;
        let dirty = self.dirty_ranges(name, ranges).await?;
        let Some(number) = self.number_of_tracked(name) else {
            return self.replace_bits(&mut quiet, name, dirty).await;
        };
        let mut old = self.bitmaps.live().bitmaps[number].dirty.clone();
        if !ranges.iter().all(|range| old.is_marked(range)) {
            old.merge(&dirty);
            self.replace_bits(&mut quiet, name, old).await?;
        }
        if let Some(number) = self.number_of_tracked(name) {
            self.bitmaps.live().bitmaps[number].end_backup(dirty);
            let table = &mut quiet.layout[number];
            table.coarse.extend(0..table.clusters.len());
        }
        Ok(())
    }

    /// The place of an enabled bitmap among those that record writes, and in the layout.
    fn number_of_tracked(&self, name: &str) -> Option<usize> {
        let live = self.bitmaps.live();
        let is_named = |bitmap: &Tracked| bitmap.name == name.as_bytes();
        live.bitmaps.iter().position(is_named)
    }

    pub(super) async fn merge_bitmaps(
        self: &Arc<Self>,
        name: &str,
        sources: &[Dirty],
    ) -> Result<()> {
        let mut quiet = self.quiesce().await?;
        self.consistent_bitmap(name).await?;
        let mut merged = self.read_bitmap(name).await?;
        for source in sources {
            merge_into(&mut merged, source)?;
        }
        self.replace_bits(&mut quiet, name, merged).await
    }

    pub(super) async fn enable_bitmap(self: &Arc<Self>, name: &str) -> Result<()> {
        let mut quiet = self.quiesce().await?;
        let (mut entries, index) = self.consistent_bitmap(name).await?;
        if entries[index].flags.contains(BitmapFlags::AUTO) {
            return Ok(());
        }
        // In a place of its own, so that nothing else is changed where it lies.
        let (dirty, old) = self.load_bitmap(&entries[index], self.size_bytes()).await?;
        let mut new = NewClusters::default();
        let table = self.store_bits(&dirty, &mut new).await?;
        self.set_crash_consistent(&entries).await?;
        let enabled = BitmapFlags::AUTO.with(BitmapFlags::IN_USE);
        entries[index].flags = entries[index].flags.with(enabled);
        point_at(&mut entries[index], &table);
        self.replace_directory(&entries, new).await?;
        self.drop_table_of_bitmap(&old);
        self.begin_one(&mut quiet, name, dirty, table);
        Ok(())
    }

    pub(super) async fn disable_bitmap(self: &Arc<Self>, name: &str) -> Result<()> {
        let mut quiet = self.quiesce().await?;
        let (mut entries, index) = self.consistent_bitmap(name).await?;
        if !entries[index].flags.contains(BitmapFlags::AUTO) {
            return Ok(());
        }
        let exact = self.read_bitmap(name).await?;
        let mut new = NewClusters::default();
        let table = self.store_bits(&exact, &mut new).await?;
        let enabled = BitmapFlags::AUTO.with(BitmapFlags::IN_USE);
        entries[index].flags = entries[index].flags.without(enabled);
        let old = self.load_bitmap(&entries[index], 0).await?.1;
        point_at(&mut entries[index], &table);
        self.replace_directory(&entries, new).await?;
        let tracked = self.end_one(&mut quiet, name).map(|(_, table)| table);
        self.drop_table_of_bitmap(&tracked.unwrap_or(old));
        Ok(())
    }

    /// The bits of a bitmap as they are now. The caller holds the layout.
    pub(super) async fn read_bitmap(&self, name: &str) -> Result<Dirty> {
        let tracked = {
            let mut live = self.bitmaps.live();
            live.find(name.as_bytes())
                .map(|tracked| tracked.dirty.clone())
        };
        if let Some(dirty) = tracked {
            return Ok(dirty);
        }
        let (entries, index) = self.consistent_bitmap(name).await?;
        let size_bytes = self.size.visible_bytes();
        Ok(self.load_bitmap(&entries[index], size_bytes).await?.0)
    }
}

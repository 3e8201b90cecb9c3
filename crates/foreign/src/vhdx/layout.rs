//! [`VhdxLayout`]: where blocks lie, and the next place for one.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;
use vellum::{BlockDevice, Error, ErrorKind, Result, Storage};

use super::bat::{BITMAP_BLOCK_BYTES, BLOCK_ALIGNMENT_BYTES, Entry, Shape, State, bitmap_run};
use super::check::check_entries;
use super::guid::Guid;
use super::header::{self, Header};
use super::image::{Image, PAGE_BYTES};
use super::invalid;
use super::metadata::Parameters;
use super::parent::ParentLocator;
use super::replay::OnLog;
use super::space::Space;
use super::writer::{Pages, Writer};
use crate::device::MappedDevice;
use crate::facts::Facts;
use crate::fields;
use crate::layout::{Layout, NewBlock, Place, Run};
use crate::partial::Bitmaps;

const ENTRIES_PER_PAGE: usize = PAGE_BYTES as usize / 8;

vellum_io::with_setters! {
    /// How an image is opened.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct OpenOptions {
        /// Nothing is written, and a log that waits keeps the image from being opened.
        pub read_only: bool,
        /// To be checked: entries may lead anywhere, and a log that waits is left to [`super::check`], unless
        /// nothing may be written to the file. The device is read-only.
        pub for_check: bool,
    }
}

impl OpenOptions {
    fn on_log(&self, file: &dyn Storage) -> OnLog {
        match (
            self.read_only || file.capabilities().read_only,
            self.for_check,
        ) {
            (true, _) => OnLog::Refuse,
            (false, true) => OnLog::Ignore,
            (false, false) => OnLog::Replay,
        }
    }
}

/// A VHDX image for [`MappedDevice`].
#[derive(Debug)]
pub struct VhdxLayout {
    file: [Arc<dyn Storage>; 1],
    shape: Shape,
    parameters: Parameters,
    parent: Option<ParentLocator>,
    /// Where the table is in the file.
    bat_bytes: u64,
    table: RwLock<Table>,
    space: Space,
    /// Held while it writes: the log is a sequence of entries, of which one is durable before the next.
    writer: async_lock::Mutex<Writer>,
    bitmaps: Bitmaps,
    keeps_identity: AtomicBool,
}

#[derive(Debug)]
struct Table {
    entries: Vec<u64>,
    /// Pages that differ from those on disk.
    changed: BTreeSet<usize>,
}

/// What a flush writes.
#[derive(Debug)]
pub struct VhdxChanges {
    pages: Pages,
    /// The file's length when they were taken.
    file_bytes: u64,
}

/// How an image names its parent; `None` if it has none. Replays a log that waits, as
/// [`open`] does.
///
/// # Errors
/// As [`open`].
pub async fn parent(file: Arc<dyn Storage>, options: OpenOptions) -> Result<Option<ParentLocator>> {
    let name = file.name().to_owned();
    let on_log = options.on_log(&*file);
    let image = Image::read(file, on_log).await;
    image
        .map(|image| image.parent)
        .map_err(|error| error.target(name))
}

/// Opens an image. `backing` is the parent of a differencing one ([`parent`] names it); without it the parent is
/// taken for zeroes. Others have none.
///
/// # Errors
/// [`ErrorKind::InvalidImage`] for what is no image, [`ErrorKind::Unsupported`] for one that needs what is
/// not known here, [`ErrorKind::PermissionDenied`] where a log would have to be replayed and nothing may be
/// written; what the storage says.
pub async fn open(
    file: Arc<dyn Storage>,
    backing: Option<Arc<dyn BlockDevice>>,
    options: OpenOptions,
) -> Result<Arc<MappedDevice<VhdxLayout>>> {
    let name = file.name().to_owned();
    let read_only = options.read_only || options.for_check || file.capabilities().read_only;
    let layout = read_layout(file, backing.as_deref(), options).await;
    let layout = layout.map_err(|error| error.target(name))?;
    let backing = backing.filter(|_| layout.parent.is_some());
    Ok(MappedDevice::new(layout, backing, read_only))
}

async fn read_layout(
    file: Arc<dyn Storage>,
    backing: Option<&dyn BlockDevice>,
    options: OpenOptions,
) -> Result<VhdxLayout> {
    let on_log = options.on_log(&*file);
    let image = Image::read(file.clone(), on_log).await?;
    if let Some(parent) = &image.parent {
        check_parent(parent, backing).await?;
    }
    let (shape, entries) = image.read_table().await?;
    let file_bytes = file.len_bytes()?;
    let mut problem = None;
    if !options.for_check {
        check_entries(&image, &shape, &entries, file_bytes, |message| {
            problem = Some(message);
            false
        });
    }
    if let Some(problem) = problem {
        return Err(invalid(problem));
    }
    let regions_end_bytes = image.regions.taken.end_bytes();
    let block_bytes = image.parameters.block_bytes;
    Ok(VhdxLayout {
        file: [file],
        shape,
        parameters: image.parameters,
        parent: image.parent,
        bat_bytes: image.regions.bat.offset_bytes,
        table: RwLock::new(Table {
            entries,
            changed: BTreeSet::new(),
        }),
        // A region may lie where the file has not come to yet.
        space: Space::new(file_bytes, regions_end_bytes, block_bytes),
        writer: async_lock::Mutex::new(image.writer),
        bitmaps: Bitmaps::default(),
        keeps_identity: AtomicBool::new(false),
    })
}

/// That the parent, if there is one, is the one that the image was made for, as far as a VHDX image can
/// tell: a parent that was written to since gives other bytes.
async fn check_parent(parent: &ParentLocator, backing: Option<&dyn BlockDevice>) -> Result<()> {
    let Some(file) = backing.and_then(|backing| backing.storage()) else {
        return Ok(());
    };
    let start = fields::read_at(&*file, 0, header::SIGNATURE.len()).await?;
    if !start.starts_with(header::SIGNATURE) {
        return Ok(());
    }
    let mut headers = [None, None];
    for (header, at_bytes) in headers.iter_mut().zip(header::OFFSETS_BYTES) {
        let bytes = fields::read_at(&*file, at_bytes, header::LEN_BYTES).await?;
        *header = Header::decode(&bytes);
    }
    let [first, second] = headers;
    match header::newer(first, second) {
        Some((_, header)) if parent.is_parent(header.data_write) => Ok(()),
        _ => Err(invalid(format!(
            "'{}' is not the parent that the VHDX image was made for, or was changed since",
            file.name()
        ))),
    }
}

impl VhdxLayout {
    /// How the image names its parent, if it is a differencing one.
    pub fn parent(&self) -> Option<&ParentLocator> {
        self.parent.as_ref()
    }

    /// Whether all blocks had their places from the beginning.
    pub fn is_fixed(&self) -> bool {
        self.parameters.leaves_blocks && self.parent.is_none()
    }

    /// The identity of what the guest sees, by which a differencing image knows this one as its parent.
    pub async fn data_write_guid(&self) -> Guid {
        self.writer.lock().await.header().data_write
    }

    fn block(&self, offset_bytes: u64) -> u64 {
        offset_bytes / self.parameters.block_bytes
    }

    /// The state and the place of a block.
    fn entry(&self, table: &Table, block: u64) -> Result<(State, u64)> {
        let index = self.shape.payload(block);
        let entry = Entry(table.entries.get(index).copied().unwrap_or_default());
        let corrupt = |message: &str| {
            let message = format!("VHDX BAT entry {index} {message}");
            let error = Error::new(ErrorKind::Corrupt, "read", message);
            Err(error
                .target(self.file[0].name())
                .at(block * self.parameters.block_bytes))
        };
        match entry.state() {
            Some(State::PartiallyPresent) if self.parent.is_none() => {
                corrupt("is of a block that is partly a parent's, and there is none")
            }
            Some(State::FullyPresent | State::PartiallyPresent)
                if entry.offset_bytes() < BLOCK_ALIGNMENT_BYTES =>
            {
                corrupt("leads into the headers")
            }
            Some(state) => Ok((state, entry.offset_bytes())),
            None => corrupt("is of an unknown kind"),
        }
    }

    /// Where a block lies, as far as its entry tells: from its beginning.
    fn place(&self, table: &Table, block: u64) -> Result<Place> {
        let (state, offset_bytes) = self.entry(table, block)?;
        Ok(match state {
            State::FullyPresent | State::PartiallyPresent => Place::Data {
                file: 0,
                offset_bytes,
            },
            State::Zero => Place::Zero,
            State::NotPresent => Place::Absent,
            // Not the parent's any more.
            State::Undefined | State::Unmapped if self.parent.is_some() => Place::Zero,
            State::Undefined | State::Unmapped => Place::Absent,
        })
    }

    fn is_partial(&self, table: &Table, block: u64) -> Result<bool> {
        Ok(self.entry(table, block)?.0 == State::PartiallyPresent)
    }

    /// A run in a block of which some sectors are here; `None` if its bitmap is not.
    fn lookup_partial(
        &self,
        table: &Table,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<Option<Run>> {
        let block = self.block(offset_bytes);
        let (_, host_bytes) = self.entry(table, block)?;
        let Some(bitmap) = self.bitmaps.get(block) else {
            return Ok(None);
        };
        let sector_bytes = self.parameters.sector_bytes;
        let in_block = offset_bytes % self.parameters.block_bytes;
        let rest_bytes = len_bytes.min(self.parameters.block_bytes - in_block);
        let first = in_block / sector_bytes;
        let count = (in_block + rest_bytes).div_ceil(sector_bytes) - first;
        let (is_here, sectors) = bitmap_run(&bitmap, first, count);
        let run_bytes = (first + sectors) * sector_bytes - in_block;
        let place = match is_here {
            true => Place::Data {
                file: 0,
                offset_bytes: host_bytes + in_block,
            },
            false => Place::Absent,
        };
        Ok(Some(Run {
            len_bytes: run_bytes.min(rest_bytes),
            place,
        }))
    }

    fn set(&self, block: u64, entry: Entry) -> Result<()> {
        let index = self.shape.payload(block);
        let mut table = self.table.write();
        let Some(value) = table.entries.get_mut(index) else {
            let message = "the VHDX block allocation table has no such block";
            return Err(Error::new(ErrorKind::Corrupt, "write", message));
        };
        if *value != entry.0 {
            *value = entry.0;
            table.changed.insert(index / ENTRIES_PER_PAGE);
        }
        self.bitmaps.forget(block);
        Ok(())
    }
}

impl Layout for VhdxLayout {
    type Changes = VhdxChanges;

    fn format(&self) -> &'static str {
        "vhdx"
    }

    fn files(&self) -> &[Arc<dyn Storage>] {
        &self.file
    }

    fn facts(&self) -> Facts {
        Facts {
            backing: self.parent.as_ref().and_then(ParentLocator::backing_name),
            ..Facts::default()
        }
    }

    fn size_bytes(&self) -> u64 {
        self.parameters.size_bytes
    }

    fn block_bytes(&self) -> u64 {
        self.parameters.block_bytes
    }

    fn has_zero_init(&self) -> bool {
        // As QEMU has it: by the first block, whether places were given out when the image was made.
        let table = self.table.read();
        let first = table.entries.first().map(|entry| Entry(*entry).state());
        first != Some(Some(State::FullyPresent)) || self.file[0].capabilities().has_zero_init
    }

    fn has_backing_files(&self) -> bool {
        self.parent.is_some()
    }

    fn is_preallocated(&self) -> bool {
        self.is_fixed()
    }

    fn lookup(&self, offset_bytes: u64, len_bytes: u64) -> Result<Option<Run>> {
        let block_bytes = self.parameters.block_bytes;
        let table = self.table.read();
        let mut block = self.block(offset_bytes);
        if self.is_partial(&table, block)? {
            return self.lookup_partial(&table, offset_bytes, len_bytes);
        }
        let first = self.place(&table, block)?;
        let in_block = offset_bytes % block_bytes;
        let mut run_bytes = block_bytes - in_block;
        while run_bytes < len_bytes {
            block += 1;
            let goes_on = match (first, self.place(&table, block)) {
                (
                    Place::Data { offset_bytes, .. },
                    Ok(Place::Data {
                        offset_bytes: next, ..
                    }),
                ) => {
                    offset_bytes + in_block + run_bytes == next
                        && !self.is_partial(&table, block)?
                }
                (first, Ok(next)) => first == next,
                (_, Err(_)) => false,
            };
            if !goes_on {
                break;
            }
            run_bytes += block_bytes;
        }
        let place = match first {
            Place::Data { file, offset_bytes } => Place::Data {
                file,
                offset_bytes: offset_bytes + in_block,
            },
            other => other,
        };
        Ok(Some(Run {
            len_bytes: run_bytes.min(len_bytes),
            place,
        }))
    }

    async fn load(&self, offset_bytes: u64) -> Result<()> {
        let block = self.block(offset_bytes);
        let index = self.shape.bitmap(block);
        let entry = self.table.read().entries.get(index).copied();
        let entry = Entry(entry.unwrap_or_default());
        if !entry.has_bitmap() || entry.offset_bytes() < BLOCK_ALIGNMENT_BYTES {
            let message = format!("VHDX BAT entry {index} leads to no sector bitmap");
            let error = Error::new(ErrorKind::Corrupt, "read", message);
            return Err(error.target(self.file[0].name()).at(offset_bytes));
        }
        let len_bytes = BITMAP_BLOCK_BYTES / self.shape.chunk_ratio;
        let at_bytes = entry.offset_bytes() + block % self.shape.chunk_ratio * len_bytes;
        let bitmap = fields::read_at(&*self.file[0], at_bytes, len_bytes as usize).await?;
        self.bitmaps.put(block, &bitmap);
        Ok(())
    }

    async fn begin_changes(&self) -> Result<()> {
        let keeps_identity = self.keeps_identity.load(Ordering::Acquire);
        self.writer.lock().await.begin(keeps_identity).await
    }

    fn keep_identity(&self, keep: bool) -> bool {
        self.keeps_identity.swap(keep, Ordering::AcqRel)
    }

    async fn change_identity(&self) -> Result<()> {
        self.writer.lock().await.change_identity().await
    }

    async fn allocate(&self, offset_bytes: u64) -> Result<NewBlock> {
        let block = self.block(offset_bytes);
        if let (State::PartiallyPresent, host_bytes) = self.entry(&self.table.read(), block)? {
            return Ok(NewBlock {
                file: 0,
                offset_bytes: host_bytes,
                reads_as_zeroes: false,
            });
        }
        let [file] = &self.file;
        let place = self.space.take(file).await?;
        Ok(NewBlock {
            file: 0,
            offset_bytes: place.start_bytes,
            reads_as_zeroes: place.is_new && file.capabilities().has_zero_init,
        })
    }

    fn give_back(&self, offset_bytes: u64, new: NewBlock) {
        let place = self.place(&self.table.read(), self.block(offset_bytes));
        // One that has some sectors already keeps its place.
        if !matches!(place, Ok(Place::Data { .. })) {
            self.space.give_back(new.offset_bytes);
        }
    }

    fn link(&self, offset_bytes: u64, block: NewBlock) -> Result<()> {
        let entry = Entry::fully_present(block.offset_bytes);
        self.set(self.block(offset_bytes), entry)
    }

    async fn zero(
        &self,
        offset_bytes: u64,
        _shows_backing: bool,
        _may_unmap: bool,
    ) -> Result<bool> {
        let block = self.block(offset_bytes);
        let (state, _) = self.entry(&self.table.read(), block)?;
        // A block with a place keeps it: nothing would find the place again.
        if matches!(state, State::FullyPresent | State::PartiallyPresent) {
            return Ok(false);
        }
        self.set(block, Entry::ZERO)?;
        Ok(true)
    }

    fn take_changes(&self) -> Option<VhdxChanges> {
        // Before the entries are looked at, all of whose blocks are inside then.
        let file_bytes = self.file[0].len_bytes().unwrap_or(0);
        let mut table = self.table.write();
        let changed = std::mem::take(&mut table.changed);
        if changed.is_empty() {
            return None;
        }
        let pages = changed.into_iter().map(|page| {
            let entries = table.entries.iter().skip(page * ENTRIES_PER_PAGE);
            let entries = entries.take(ENTRIES_PER_PAGE);
            let mut bytes: Vec<u8> = entries.flat_map(|entry| entry.to_le_bytes()).collect();
            bytes.resize(PAGE_BYTES as usize, 0);
            (self.bat_bytes + page as u64 * PAGE_BYTES, bytes)
        });
        Some(VhdxChanges {
            pages: pages.collect(),
            file_bytes,
        })
    }

    fn changed_bytes(&self) -> u64 {
        self.table.read().changed.len() as u64 * PAGE_BYTES
    }

    async fn write_changes(&self, changes: &VhdxChanges) -> Result<()> {
        let mut writer = self.writer.lock().await;
        writer.write(&changes.pages, changes.file_bytes).await
    }

    async fn end_changes(&self) -> Result<()> {
        self.writer.lock().await.end().await
    }
}

//! [`VpcLayout`]: where blocks lie.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use vellum::{BlockDevice, Error, ErrorKind, Result, Storage};
use vellum_io::bits::Bits;
use vellum_io::finish_all;

use super::footer::SizeCalculation;
use super::header::{Header, UNALLOCATED};
use super::image::{Image, read_footer, read_table};
use super::parent::Parent;
use super::space::Space;
use super::{bitmap, invalid};
use crate::device::MappedDevice;
use crate::entries::{ChangedEntries, Entries};
use crate::facts::Facts;
use crate::fields;
use crate::layout::{Layout, NewBlock, Place, Run};
use crate::partial::Bitmaps;

/// What the device takes for a block of a fixed image, in bytes.
const FIXED_BLOCK_BYTES: u64 = 2 << 20;
const WRITES_AT_ONCE: usize = 16;

vellum_io::with_setters! {
    /// How an image is opened.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct OpenOptions {
        /// Nothing is written.
        pub read_only: bool,
        /// Which of the image's two sizes is believed.
        pub size_calculation: SizeCalculation,
    }
}

/// A VHD image for [`MappedDevice`].
#[derive(Debug)]
pub struct VpcLayout {
    file: [Arc<dyn Storage>; 1],
    size_bytes: u64,
    parent: Option<Parent>,
    /// `None` for a fixed image, whose bytes lie as they are.
    blocks: Option<Blocks>,
}

/// The blocks of a dynamic or differencing image.
#[derive(Debug)]
struct Blocks {
    block_bytes: u64,
    bitmap_bytes: u64,
    /// Bitmaps have to be looked at before a block's bytes are used.
    needs_bitmaps: bool,
    state: Mutex<State>,
    space: Space,
    bitmaps: Bitmaps,
    /// Something is written to the image: then the bitmaps of dynamic images are made right.
    is_changing: AtomicBool,
}

#[derive(Debug)]
struct State {
    table: Entries,
    /// Blocks that are known to be whole.
    whole: Bits,
    /// Blocks whose bitmaps lack bits on disk, and are to have them all.
    mended: BTreeSet<u64>,
}

impl State {
    /// Where the bitmap of a block lies, and its bytes behind it.
    fn place(&self, block: u64) -> Option<u64> {
        let entry = self.table.get(block as usize).unwrap_or(UNALLOCATED);
        (entry != UNALLOCATED).then(|| u64::from(entry) * 512)
    }
}

/// What a flush writes.
#[derive(Debug)]
pub struct VpcChanges {
    table: ChangedEntries,
    /// Where bitmaps lie that get all their bits.
    bitmaps: Vec<u64>,
}

/// How an image names its parent; `None` if it has none.
///
/// # Errors
/// As [`open`].
pub async fn parent(file: Arc<dyn Storage>, options: OpenOptions) -> Result<Option<Parent>> {
    let name = file.name().to_owned();
    let image = Image::read(file, options.size_calculation).await;
    image
        .map(|image| image.parent)
        .map_err(|error| error.target(name))
}

/// Opens an image. `backing` is the parent of a differencing one ([`parent`] names it); without it the parent is
/// taken for zeroes. Others have none.
///
/// # Errors
/// [`ErrorKind::InvalidImage`], in QEMU's words, for what is no image, [`ErrorKind::Unsupported`] for one that is
/// too large; what the storage says.
pub async fn open(
    file: Arc<dyn Storage>,
    backing: Option<Arc<dyn BlockDevice>>,
    options: OpenOptions,
) -> Result<Arc<MappedDevice<VpcLayout>>> {
    let name = file.name().to_owned();
    let read_only = options.read_only || file.capabilities().read_only;
    let layout = read_layout(file, backing.as_deref(), options, read_only).await;
    let layout = layout.map_err(|error| error.target(name))?;
    let backing = backing.filter(|_| layout.parent.is_some());
    Ok(MappedDevice::new(layout, backing, read_only))
}

async fn read_layout(
    file: Arc<dyn Storage>,
    backing: Option<&dyn BlockDevice>,
    options: OpenOptions,
    read_only: bool,
) -> Result<VpcLayout> {
    let image = Image::read(file, options.size_calculation).await?;
    if let Some(parent) = &image.parent {
        check_parent(parent, backing).await?;
    }
    let blocks = match &image.header {
        Some(header) => Some(read_blocks(&image, header, read_only).await?),
        None => {
            check_fixed(&image, read_only)?;
            None
        }
    };
    Ok(VpcLayout {
        file: [image.file],
        size_bytes: image.size_bytes,
        parent: image.parent,
        blocks,
    })
}

async fn read_blocks(image: &Image, header: &Header, read_only: bool) -> Result<Blocks> {
    let (table, blocks_end_bytes) = read_table(&*image.file, header).await?;
    let end_bytes = blocks_end_bytes.max(image.metadata_end_bytes(header)?);
    let block_bytes = u64::from(header.block_bytes);
    let bitmap_bytes = header.bitmap_bytes();
    if image.parent.is_some() && bitmap_bytes == 0 {
        return Err(invalid(format!("Invalid block size {block_bytes}")));
    }
    let footer = image.footer.clone();
    let space = Space::new(&*image.file, footer, end_bytes, bitmap_bytes, block_bytes).await?;
    let blocks = table.values().len() as u64;
    Ok(Blocks {
        block_bytes,
        bitmap_bytes,
        needs_bitmaps: bitmap_bytes > 0 && (image.parent.is_some() || !read_only),
        state: Mutex::new(State {
            table,
            whole: Bits::none(blocks),
            mended: BTreeSet::new(),
        }),
        space,
        bitmaps: Bitmaps::default(),
        is_changing: AtomicBool::new(false),
    })
}

/// That what the guest writes does not go over the footer.
fn check_fixed(image: &Image, read_only: bool) -> Result<()> {
    let there_bytes = image.file.len_bytes()?.saturating_sub(512);
    match read_only || image.size_bytes <= there_bytes {
        true => Ok(()),
        false => Err(invalid(format!(
            "the VHD image has {there_bytes} bytes of a disk of {}, so it can only be read",
            image.size_bytes
        ))),
    }
}

/// That the parent, if there is one, is the one that the image was made for, as far as it is a VHD image.
async fn check_parent(parent: &Parent, backing: Option<&dyn BlockDevice>) -> Result<()> {
    let Some(file) = backing.and_then(|backing| backing.storage()) else {
        return Ok(());
    };
    match read_footer(&*file).await {
        Ok((footer, _)) if footer.id() != parent.id => Err(invalid(format!(
            "'{}' is not the parent that the VHD image was made for",
            file.name()
        ))),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::InvalidImage => Ok(()),
        Err(error) => Err(error),
    }
}

impl Blocks {
    fn block(&self, offset_bytes: u64) -> u64 {
        offset_bytes / self.block_bytes
    }

    fn sectors(&self) -> u64 {
        self.block_bytes / 512
    }

    fn lookup(&self, offset_bytes: u64, len_bytes: u64, has_parent: bool) -> Option<Run> {
        let state = self.state.lock();
        let block = self.block(offset_bytes);
        let in_block = offset_bytes % self.block_bytes;
        let Some(place) = state.place(block) else {
            return Some(self.absent_run(&state, offset_bytes, len_bytes));
        };
        let data = Place::Data {
            file: 0,
            offset_bytes: place + self.bitmap_bytes + in_block,
        };
        let rest_bytes = len_bytes.min(self.block_bytes - in_block);
        if !self.needs_bitmaps || state.whole.contains(block) {
            return Some(Run {
                len_bytes: rest_bytes,
                place: data,
            });
        }
        if !has_parent {
            return None;
        }
        let bits = self.bitmaps.get(block)?;
        let first = in_block / 512;
        let count = (in_block + rest_bytes).div_ceil(512) - first;
        let (is_here, sectors) = bitmap::run(&bits, first, count);
        let run_bytes = (first + sectors) * 512 - in_block;
        Some(Run {
            len_bytes: run_bytes.min(rest_bytes),
            place: if is_here { data } else { Place::Absent },
        })
    }

    /// Blocks without a place, from an offset in one on.
    fn absent_run(&self, state: &State, offset_bytes: u64, len_bytes: u64) -> Run {
        let mut block = self.block(offset_bytes);
        let mut run_bytes = self.block_bytes - offset_bytes % self.block_bytes;
        while run_bytes < len_bytes && state.place(block + 1).is_none() {
            block += 1;
            run_bytes += self.block_bytes;
        }
        Run {
            len_bytes: run_bytes.min(len_bytes),
            place: Place::Absent,
        }
    }

    /// Reads the bitmap of a block. That of a dynamic image tells nothing of the bytes, as QEMU has it; but
    /// programs that have it otherwise are to see what is written.
    async fn load(&self, file: &dyn Storage, block: u64, has_parent: bool) -> Result<()> {
        let place = self.state.lock().place(block);
        let Some(place) = place else {
            return Ok(());
        };
        let bits = fields::read_at(file, place, self.bitmap_bytes as usize).await?;
        let is_whole = bitmap::is_whole(&bits, self.sectors());
        if has_parent && !is_whole {
            self.bitmaps.put(block, &bits);
            return Ok(());
        }
        let mut state = self.state.lock();
        // What came between has all bits, too.
        state.whole.insert(block);
        if !is_whole {
            state.mended.insert(block);
        }
        Ok(())
    }
}

impl VpcLayout {
    /// How the image names its parent, if it is a differencing one.
    pub fn parent(&self) -> Option<&Parent> {
        self.parent.as_ref()
    }

    /// Whether the bytes lie as they are.
    pub fn is_fixed(&self) -> bool {
        self.blocks.is_none()
    }

    fn blocks(&self) -> Result<&Blocks> {
        self.blocks.as_ref().ok_or_else(|| {
            let message = "a fixed VHD image has no blocks";
            Error::new(ErrorKind::Unsupported, "write", message).target(self.file[0].name())
        })
    }
}

impl Layout for VpcLayout {
    type Changes = VpcChanges;

    fn format(&self) -> &'static str {
        "vpc"
    }

    fn files(&self) -> &[Arc<dyn Storage>] {
        &self.file
    }

    fn facts(&self) -> Facts {
        Facts {
            backing: self.parent.as_ref().and_then(Parent::backing_name),
            ..Facts::default()
        }
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn block_bytes(&self) -> u64 {
        let blocks = self.blocks.as_ref();
        blocks.map_or(FIXED_BLOCK_BYTES, |blocks| blocks.block_bytes)
    }

    fn cluster_size_bytes(&self) -> Option<u64> {
        self.blocks.as_ref().map(|blocks| blocks.block_bytes)
    }

    fn has_zero_init(&self) -> bool {
        !self.is_fixed() || self.file[0].capabilities().has_zero_init
    }

    fn has_backing_files(&self) -> bool {
        self.parent.is_some()
    }

    fn is_preallocated(&self) -> bool {
        self.is_fixed()
    }

    fn lookup(&self, offset_bytes: u64, len_bytes: u64) -> Result<Option<Run>> {
        match &self.blocks {
            Some(blocks) => Ok(blocks.lookup(offset_bytes, len_bytes, self.parent.is_some())),
            None => Ok(Some(Run {
                len_bytes,
                place: Place::Data {
                    file: 0,
                    offset_bytes,
                },
            })),
        }
    }

    async fn load(&self, offset_bytes: u64) -> Result<()> {
        let blocks = self.blocks()?;
        let block = blocks.block(offset_bytes);
        blocks
            .load(&*self.file[0], block, self.parent.is_some())
            .await
    }

    async fn begin_changes(&self) -> Result<()> {
        if let Some(blocks) = &self.blocks {
            blocks.is_changing.store(true, Ordering::Release);
        }
        Ok(())
    }

    async fn allocate(&self, offset_bytes: u64) -> Result<NewBlock> {
        let blocks = self.blocks()?;
        let [file] = &self.file;
        let place = blocks.state.lock().place(blocks.block(offset_bytes));
        if let Some(place) = place {
            return Ok(NewBlock {
                file: 0,
                offset_bytes: place + blocks.bitmap_bytes,
                reads_as_zeroes: false,
            });
        }
        let new = blocks.space.take(file).await?;
        Ok(NewBlock {
            file: 0,
            offset_bytes: new.offset_bytes + blocks.bitmap_bytes,
            reads_as_zeroes: new.is_fresh && file.capabilities().has_zero_init,
        })
    }

    fn give_back(&self, offset_bytes: u64, new: NewBlock) {
        let Some(blocks) = &self.blocks else {
            return;
        };
        // One that has some sectors already keeps its place.
        let place = blocks.state.lock().place(blocks.block(offset_bytes));
        if place.is_none() {
            let start = new.offset_bytes.saturating_sub(blocks.bitmap_bytes);
            blocks.space.give_back(start);
        }
    }

    fn link(&self, offset_bytes: u64, new: NewBlock) -> Result<()> {
        let blocks = self.blocks()?;
        let block = blocks.block(offset_bytes);
        let mut state = blocks.state.lock();
        if state.place(block).is_some() {
            state.mended.insert(block);
        } else {
            let place = new.offset_bytes.saturating_sub(blocks.bitmap_bytes) / 512;
            let place = u32::try_from(place).unwrap_or(UNALLOCATED);
            if !state.table.set(block as usize, place) {
                let message = "the VHD block allocation table has no such block";
                return Err(Error::new(ErrorKind::Corrupt, "write", message));
            }
        }
        state.whole.insert(block);
        drop(state);
        blocks.bitmaps.forget(block);
        Ok(())
    }

    fn take_changes(&self) -> Option<VpcChanges> {
        let blocks = self.blocks.as_ref()?;
        let mut state = blocks.state.lock();
        let is_changing = blocks.is_changing.load(Ordering::Acquire);
        let mended = match is_changing {
            true => std::mem::take(&mut state.mended),
            // An image that is only read is not written.
            false => BTreeSet::new(),
        };
        if mended.is_empty() && !state.table.has_changed() {
            return None;
        }
        let bitmaps = mended.into_iter().filter_map(|block| state.place(block));
        Some(VpcChanges {
            bitmaps: bitmaps.collect(),
            table: state.table.take_changed(),
        })
    }

    fn changed_bytes(&self) -> u64 {
        self.blocks.as_ref().map_or(0, |blocks| {
            let state = blocks.state.lock();
            let mended = match blocks.is_changing.load(Ordering::Acquire) {
                true => state.mended.len() as u64,
                false => 0,
            };
            state.table.changed_bytes() + mended * 64
        })
    }

    async fn write_changes(&self, changes: &VpcChanges) -> Result<()> {
        let [file] = &self.file;
        let bits = vec![0xff; self.blocks()?.bitmap_bytes as usize];
        let bitmaps = changes.bitmaps.iter();
        let bitmaps = bitmaps.map(|at_bytes| fields::write_at(&**file, *at_bytes, &bits));
        finish_all(WRITES_AT_ONCE, bitmaps).await?;
        changes.table.write(&**file).await
    }

    async fn end_changes(&self) -> Result<()> {
        let Some(blocks) = &self.blocks else {
            return Ok(());
        };
        blocks.is_changing.store(false, Ordering::Release);
        blocks.space.end(&self.file[0]).await
    }
}

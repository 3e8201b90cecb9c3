//! [`NodeBitmap`]: a dirty bitmap of a node, in its image or in memory.

use std::ops::Range;
use std::sync::Arc;

use vellum::nodes::Recorder;
use vellum::qcow2::{AsQcow2, BitmapOptions, BitmapView, Bitmaps, DirtyBitmap, MemoryBitmap};
use vellum::{Error, ErrorKind, Result};

use crate::Nodes;
use crate::node::errors::unknown_node;

/// A bitmap by its name, wherever it is.
#[derive(Debug, Clone)]
pub struct NodeBitmap {
    /// Unique among the bitmaps of its node.
    pub name: String,
    place: Place,
}

#[derive(Debug, Clone)]
enum Place {
    Image(Bitmaps),
    Memory(Arc<MemoryBitmap>, Arc<Recorder>),
}

/// What there is to say of a bitmap.
#[derive(Debug, Clone, Copy)]
pub struct BitmapState {
    /// Bytes for which one bit stands.
    pub granularity_bytes: u64,
    /// It is kept in the image.
    pub persistent: bool,
    /// It records writes.
    pub records: bool,
    /// Its content is known.
    pub consistent: bool,
}

/// The bitmaps of a node, the oldest first.
///
/// # Errors
/// If there is no such node, or the directory of its image cannot be read.
pub async fn list(nodes: &Nodes, node: &str) -> Result<Vec<(NodeBitmap, BitmapState)>> {
    let keepers = nodes.bitmap_keepers(node);
    let (image, recorder) = keepers.ok_or_else(|| unknown_node(node))?;
    let mut found = Vec::new();
    if let Some(image) = image.as_ref().and_then(|image| image.as_qcow2()) {
        for info in image.bitmaps().list().await? {
            let state = BitmapState {
                granularity_bytes: info.granularity_bytes,
                persistent: true,
                records: info.auto,
                consistent: info.consistent,
            };
            let place = Place::Image(image.bitmaps());
            let name = info.name;
            found.push((NodeBitmap { name, place }, state));
        }
    }
    for bitmap in recorder.bitmaps() {
        let state = BitmapState {
            granularity_bytes: bitmap.granularity_bytes(),
            persistent: false,
            records: bitmap.records(),
            consistent: true,
        };
        let name = bitmap.name().to_owned();
        let place = Place::Memory(bitmap, recorder.clone());
        found.push((NodeBitmap { name, place }, state));
    }
    found.sort_by_key(|(bitmap, _)| nodes.bitmap_number(node, &bitmap.name));
    Ok(found)
}

/// The bitmap of a node that has a name.
///
/// # Errors
/// As [`list`].
pub async fn find(
    nodes: &Nodes,
    node: &str,
    name: &str,
) -> Result<Option<(NodeBitmap, BitmapState)>> {
    let mut all = list(nodes, node).await?.into_iter();
    Ok(all.find(|(bitmap, _)| bitmap.name == name))
}

impl NodeBitmap {
    /// What it calls dirty now.
    ///
    /// # Errors
    /// If it is gone, or its content is lost; what reading meets.
    pub async fn read(&self) -> Result<DirtyBitmap> {
        match &self.place {
            Place::Image(bitmaps) => bitmaps.read(&self.name).await,
            Place::Memory(bitmap, _) => Ok(bitmap.read()),
        }
    }

    /// Makes it call some ranges dirty, and nothing else.
    ///
    /// # Errors
    /// As [`NodeBitmap::read`], and of writing.
    pub async fn set(&self, ranges: Vec<Range<u64>>) -> Result<()> {
        match &self.place {
            Place::Image(bitmaps) => bitmaps.set(&self.name, ranges).await,
            Place::Memory(bitmap, _) => {
                bitmap.set(&ranges);
                Ok(())
            }
        }
    }

    /// As [`NodeBitmap::set`], once a backup is complete: see [`Bitmaps::set_after_backup`].
    ///
    /// # Errors
    /// As [`NodeBitmap::set`].
    pub async fn set_after_backup(&self, ranges: Vec<Range<u64>>) -> Result<()> {
        match &self.place {
            Place::Image(bitmaps) => bitmaps.set_after_backup(&self.name, ranges).await,
            Place::Memory(..) => self.set(ranges).await,
        }
    }

    /// Has it record writes from now on, or no more.
    ///
    /// # Errors
    /// As [`NodeBitmap::set`].
    pub async fn set_records(&self, records: bool) -> Result<()> {
        match (&self.place, records) {
            (Place::Image(bitmaps), true) => bitmaps.enable(&self.name).await,
            (Place::Image(bitmaps), false) => bitmaps.disable(&self.name).await,
            (Place::Memory(bitmap, _), records) => {
                bitmap.set_records(records);
                Ok(())
            }
        }
    }

    /// Adds what others call dirty.
    ///
    /// # Errors
    /// As [`NodeBitmap::set`], and if the sizes differ.
    pub async fn merge(&self, sources: Vec<DirtyBitmap>) -> Result<()> {
        match &self.place {
            Place::Image(bitmaps) => bitmaps.merge(&self.name, sources).await,
            Place::Memory(bitmap, _) => {
                let size_bytes = bitmap.read().size_bytes();
                if let Some(other) = sources.iter().find(|one| one.size_bytes() != size_bytes) {
                    let message = format!(
                        "Bitmaps are of different sizes (destination size is {size_bytes}, source \
                         size is {}) and can't be merged",
                        other.size_bytes()
                    );
                    return Err(Error::new(ErrorKind::InvalidArgument, "bitmap", message));
                }
                sources.iter().for_each(|source| bitmap.merge(source));
                Ok(())
            }
        }
    }

    /// Removes it.
    ///
    /// # Errors
    /// As [`NodeBitmap::set`].
    pub async fn remove(&self) -> Result<()> {
        match &self.place {
            Place::Image(bitmaps) => bitmaps.remove(&self.name).await,
            Place::Memory(_, recorder) => {
                recorder.remove(&self.name);
                Ok(())
            }
        }
    }

    /// It, for questions about single ranges while the node changes.
    ///
    /// # Errors
    /// As [`NodeBitmap::read`].
    pub async fn view(&self) -> Result<BitmapView> {
        match &self.place {
            Place::Image(bitmaps) => bitmaps.view(&self.name).await,
            Place::Memory(bitmap, _) => Ok(bitmap.clone().into()),
        }
    }
}

/// A bitmap that was removed, and may be had back until what it was removed with is done. In memory it goes
/// on recording.
#[derive(Debug)]
pub struct RemovedBitmap {
    bitmap: Arc<MemoryBitmap>,
    recorder: Arc<Recorder>,
    was_in_image: bool,
}

impl NodeBitmap {
    /// Removes it from a node, so that it can be had back; one whose content cannot be read cannot.
    ///
    /// # Errors
    /// As [`NodeBitmap::set`]: it is as it was then.
    pub async fn take_out(
        &self,
        state: &BitmapState,
        node: (&Nodes, &str),
    ) -> Result<Option<RemovedBitmap>> {
        let bitmaps = match &self.place {
            Place::Image(bitmaps) => bitmaps,
            Place::Memory(bitmap, recorder) => {
                recorder.remove(&self.name);
                return Ok(Some(RemovedBitmap {
                    bitmap: bitmap.clone(),
                    recorder: recorder.clone(),
                    was_in_image: false,
                }));
            }
        };
        let (nodes, name) = node;
        let recorder = nodes.recorder(name).filter(|_| state.consistent);
        let Some(recorder) = recorder else {
            bitmaps.remove(&self.name).await?;
            return Ok(None);
        };
        let size_bytes = nodes.device(name)?.size_bytes();
        let granularity_bytes = state.granularity_bytes;
        let bitmap = MemoryBitmap::new(&self.name, size_bytes, granularity_bytes, state.records);
        // First of all: jobs may write to the node, and nothing of that must be missing.
        recorder.add(bitmap.clone());
        let content = bitmaps.read(&self.name).await;
        let can_be_had_back = content.is_ok();
        content.iter().for_each(|content| bitmap.merge(content));
        let removed = bitmaps.remove(&self.name).await;
        if !can_be_had_back || removed.is_err() {
            recorder.remove(&self.name);
            return removed.map(|()| None);
        }
        Ok(Some(RemovedBitmap {
            bitmap,
            recorder,
            was_in_image: true,
        }))
    }
}

impl RemovedBitmap {
    /// It is gone for good.
    pub fn settle(self) {
        if self.was_in_image {
            self.recorder.remove(self.bitmap.name());
        }
    }

    /// Has a node have it again.
    ///
    /// # Errors
    /// If its image cannot take it: it stays in memory then, and records as before.
    pub async fn restore(self, nodes: &Nodes, node: &str) -> Result<()> {
        let name = self.bitmap.name();
        if !self.was_in_image {
            self.recorder.add(self.bitmap.clone());
            return Ok(());
        }
        let device = nodes.device(node)?;
        let image = device.as_qcow2().ok_or_else(|| unknown_node(node))?;
        let options = BitmapOptions::default()
            .granularity_bytes(Some(self.bitmap.granularity_bytes()))
            .disabled(!self.bitmap.records())
            .node_name(Some(node.to_owned()));
        image.bitmaps().add(name, options).await?;
        let content = vec![self.bitmap.read()];
        if let Err(error) = image.bitmaps().merge(name, content).await {
            // One of them has the name, and this one has the content.
            let _ = image.bitmaps().remove(name).await;
            return Err(error);
        }
        self.settle();
        Ok(())
    }
}

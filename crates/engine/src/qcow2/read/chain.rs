//! A long backing chain costs one lookup a request: what lies below an image, seen as
//! one mapping from guest ranges to places in layers.
//!
//! The mapping is made region by region, when a region is first read: all layers are
//! asked once for what they hold of it, and the answer is kept (`chain_index`). The image's
//! own mapping is not part of it. So writes, discards, snapshots and resizes of the image
//! need not touch it: what the image does not map itself is looked up here.
//!
//! Invariants:
//! - Every layer in the mapping is an image that is open read-only, so its mapping never
//!   changes. What is not (raw files, devices that do more than map, an image that
//!   somebody writes to) is the *rest*: it is asked anew each time.
//! - Reads beyond the end of a layer are zeroes, whatever lies below.
//! - Layers that stand on links are in the mapping as long as these lead to them: it is a
//!   [`Shortcut`](crate::nodes::shortcut::Shortcut), which a link that is drained takes away with all that was
//!   found, and which is found anew when something is read after that. Reads meanwhile go from image to
//!   image, and wait at the link.

use std::ops::Range;
use std::sync::Arc;

use futures_util::stream::{FuturesUnordered, StreamExt};
use vellum_format::types::GuestOffset;
use vellum_io::{Buffer, Buffers, Error, Result};
use vellum_storage::Storage;

use super::chain_index::{ChainRun, Place, Region};
use super::data;
use super::layers::{BackingChain, DataInUse, Layer, Layers, LayersInUse};
use crate::BlockDevice;
use crate::qcow2::device::Qcow2;
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::RunKind;
use crate::qcow2::options::OpenOptions;

/// Pieces of one request read at the same time.
const MAX_PARALLEL_PIECES: usize = 64;
const DEFAULT_INDEX_BYTES: u64 = 8 << 20;

impl OpenOptions {
    /// The budget of the merged index with its default filled in.
    pub(crate) fn chain_index_bytes(&self) -> usize {
        let bytes = self.chain_index_size_bytes.unwrap_or(DEFAULT_INDEX_BYTES);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }
}

/// Where bytes lie as the guest sees them.
#[derive(Debug)]
pub(crate) struct Located {
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
}

/// The image that a device is, if its mapping does not change.
pub(super) fn read_only_image(device: &Arc<dyn BlockDevice>) -> Option<&Arc<Image>> {
    let image = device.transparent_device()?.downcast_ref();
    let image = image.map(|Qcow2 { image }| image);
    image.filter(|image| image.read_only)
}

/// Where the first of a range's bytes lie in a device's own file.
async fn locate_in(
    device: Option<&Arc<dyn BlockDevice>>,
    offset: u64,
    len_bytes: u64,
) -> Result<Option<Located>> {
    let Some(device) = device.filter(|device| device.size_bytes() > offset) else {
        return Ok(None);
    };
    let len_bytes = len_bytes.min(device.size_bytes() - offset);
    if let Some((storage, start)) = device.bytes_in() {
        let offset_bytes = start + offset;
        return Ok(Some(Located {
            storage,
            offset_bytes,
            len_bytes,
        }));
    }
    let Some(image) = read_only_image(device).filter(|image| image.reads_as_stored()) else {
        return Ok(None);
    };
    let run = image.view(GuestOffset(offset), len_bytes).await?[0];
    let RunKind::Data { host, .. } = run.kind else {
        return Ok(None);
    };
    Ok(Some(Located {
        storage: image.data.clone(),
        offset_bytes: host.bytes(),
        len_bytes: run.len_bytes,
    }))
}

impl Layers {
    /// Asks layer after layer for what it holds of a range.
    async fn resolve(&self, range: Range<u64>) -> Result<Region> {
        let mut found: Vec<(u64, ChainRun)> = Vec::new();
        let mut missing = vec![range.clone()];
        for (number, layer) in self.images.iter().enumerate() {
            let mut still_missing: Vec<Range<u64>> = Vec::new();
            for range in missing {
                let end = layer.image.size_bytes().clamp(range.start, range.end);
                if end < range.end {
                    found.push((end, zeroes(range.end)));
                }
                layer
                    .resolve(
                        number as u16,
                        range.start..end,
                        &mut found,
                        &mut still_missing,
                    )
                    .await?;
            }
            missing = still_missing;
        }
        for range in missing {
            let place = self.rest.as_ref().map_or(Place::Zero, |_| Place::Rest);
            let end = range.end;
            found.push((range.start, ChainRun { end, place }));
        }
        found.sort_unstable_by_key(|(start, _)| *start);
        let runs = found.into_iter().map(|(_, run)| run).collect();
        Ok(Region::new(range.start, runs))
    }

    async fn read_place(&self, place: Place, offset: u64, mut piece: Buffer) -> Result<Buffer> {
        match place {
            Place::Zero => {
                piece.fill(0);
                Ok(piece)
            }
            Place::Data { layer, host } => {
                let buffers = Buffers::from_iter([piece]);
                self.data(layer).read(host, buffers).into_single().await
            }
            Place::Layer(layer) => {
                let image = &self.images[usize::from(layer)].image;
                data::read(image, offset, piece).await
            }
            Place::Rest => data::read_padded(self.rest.as_ref(), offset, piece).await,
        }
    }
}

fn zeroes(end: u64) -> ChainRun {
    let place = Place::Zero;
    ChainRun { end, place }
}

impl Layer {
    /// Sorts a range into what this layer decides and what it does not hold.
    async fn resolve(
        &self,
        number: u16,
        range: Range<u64>,
        found: &mut Vec<(u64, ChainRun)>,
        missing: &mut Vec<Range<u64>>,
    ) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let view = self.image.view(GuestOffset(at), range.end - at).await?;
            for run in view {
                let end = at + run.len_bytes;
                let place = match run.kind {
                    RunKind::Unallocated { .. } => {
                        match missing.last_mut() {
                            Some(last) if last.end == at => last.end = end,
                            _ => missing.push(at..end),
                        }
                        at = end;
                        continue;
                    }
                    RunKind::Zero { .. } => Place::Zero,
                    RunKind::Data { host, .. } if self.plain => Place::Data {
                        layer: number,
                        host: host.bytes(),
                    },
                    _ => Place::Layer(number),
                };
                found.push((at, ChainRun { end, place }));
                at = end;
            }
        }
        Ok(())
    }
}

impl BackingChain {
    /// Where a range lies, if memory knows it and it is one piece of a layer's file.
    pub(crate) fn place(&self, offset: u64, len_bytes: u64) -> Option<(DataInUse<'_>, u64)> {
        let layers = self.layers()?;
        let region = layers.index.get(offset / layers.region_bytes)?;
        let run = region.find(offset)?;
        match run.place {
            Place::Data { layer, host } if run.end >= offset + len_bytes => {
                Some((layers.into_data(layer), host))
            }
            _ => None,
        }
    }

    /// Where the first of a range's bytes lie, if they lie somewhere as they are.
    pub(crate) async fn locate(&self, offset: u64, len_bytes: u64) -> Result<Option<Located>> {
        // Where a link leads to a storage may be another one's a moment later.
        let Some(LayersInUse::Fixed(layers)) = self.layers() else {
            return locate_in(self.below.as_ref(), offset, len_bytes).await;
        };
        let region = layers.region(offset..offset + len_bytes).await?;
        let Some(run) = region.find(offset) else {
            return Ok(None);
        };
        let len_bytes = len_bytes.min(run.end - offset);
        match run.place {
            Place::Data { layer, host } => Ok(Some(Located {
                storage: layers.data(layer).clone(),
                offset_bytes: host,
                len_bytes,
            })),
            Place::Rest => locate_in(layers.rest.as_ref(), offset, len_bytes).await,
            Place::Zero | Place::Layer(_) => Ok(None),
        }
    }
}

impl Layers {
    /// Reads what lies below an image; beyond its end there are zeroes.
    pub(crate) async fn read(&self, offset: u64, piece: Buffer) -> Result<Buffer> {
        let mut at = offset;
        let mut rest = piece;
        let mut done: Vec<(u64, Buffer)> = Vec::new();
        let mut running = FuturesUnordered::new();
        while !rest.is_empty() {
            let end = at + rest.len() as u64;
            let region = self.region(at..end).await?;
            while let Some(run) = region.find(at).filter(|_| !rest.is_empty()) {
                let len_bytes = run.end.min(end) - at;
                if len_bytes == rest.len() as u64 && at == offset {
                    return self.read_place(run.place, at, rest).await;
                }
                let piece = rest.split_to(len_bytes as usize);
                if running.len() >= MAX_PARALLEL_PIECES
                    && let Some(finished) = running.next().await
                {
                    done.push(finished?);
                }
                let start = at;
                running.push(async move {
                    let read = self.read_place(run.place, start, piece).await?;
                    Ok::<_, Error>((start, read))
                });
                at += len_bytes;
            }
        }
        while let Some(finished) = running.next().await {
            done.push(finished?);
        }
        drop(running);
        done.sort_by_key(|(start, _)| *start);
        Ok(Buffer::join_all(done.into_iter().map(|(_, piece)| piece)))
    }

    /// The mapping of the beginning of a range, perhaps of more.
    async fn region(&self, range: Range<u64>) -> Result<Arc<Region>> {
        let number = range.start / self.region_bytes;
        if let Some(region) = self.index.get(number) {
            return Ok(region);
        }
        let start = number * self.region_bytes;
        let end = start.saturating_add(self.region_bytes);
        if !self.index.admits(number) {
            let range = range.start..range.end.min(end);
            return self.resolve(range).await.map(Arc::new);
        }
        let region = Arc::new(self.resolve(start..end).await?);
        self.index.insert(number, region.clone());
        Ok(region)
    }
}

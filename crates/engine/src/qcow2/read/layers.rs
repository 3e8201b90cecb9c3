//! [`BackingChain`]: what an image knows of what lies below it.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use vellum_io::sync::Mutex;
use vellum_storage::Storage;

use super::chain_index::ChainIndex;
use crate::BlockDevice;
use crate::nodes::shortcut::{Entered, Passage, Shortcut};
use crate::qcow2::cache_budget::CacheShare;
use crate::qcow2::image::Image;

/// What lies below an image; see [`chain`](super::chain).
#[derive(Debug)]
pub(crate) struct BackingChain {
    pub(super) below: Option<Arc<dyn BlockDevice>>,
    /// An image that is read there has checksums.
    pub(crate) may_heal: bool,
    pub(super) limits: IndexLimits,
    pub(super) merged: Merged,
}

/// What an index may take.
#[derive(Debug)]
pub(super) struct IndexLimits {
    pub(super) budget_bytes: usize,
    pub(super) share: Arc<CacheShare>,
}

/// How what lies below becomes one mapping.
#[derive(Debug)]
pub(super) enum Merged {
    /// It does not: too few images that are open read-only lie there.
    Never,
    /// Once for all, when something is first read there.
    Once(OnceLock<Box<Layers>>),
    /// There are links, so for as long as these lead where they do.
    PastLinks(Mutex<Option<Arc<Shortcut<Layers>>>>),
}

/// The images below, what stands below them, and the mapping of all.
#[derive(Debug)]
pub(crate) struct Layers {
    pub(super) images: Vec<Layer>,
    pub(super) rest: Option<Arc<dyn BlockDevice>>,
    pub(super) region_bytes: u64,
    pub(super) index: ChainIndex,
}

#[derive(Debug)]
pub(super) struct Layer {
    pub(super) image: Arc<Image>,
    /// Its data is read from its storage as the guest sees it.
    pub(super) plain: bool,
}

/// The layers, for one request.
#[derive(Debug)]
pub(crate) enum LayersInUse<'a> {
    Fixed(&'a Layers),
    /// What the request passes waits for its end.
    Passed(Passage<Layers>),
}

/// The file in which bytes lie, for one request.
#[derive(Debug)]
pub(crate) enum DataInUse<'a> {
    Fixed(&'a Arc<dyn Storage>),
    /// That of a layer.
    Passed(Passage<Layers>, u16),
}

impl Deref for LayersInUse<'_> {
    type Target = Layers;

    fn deref(&self) -> &Layers {
        match self {
            LayersInUse::Fixed(layers) => layers,
            LayersInUse::Passed(passage) => passage,
        }
    }
}

impl<'a> LayersInUse<'a> {
    /// The file of a layer.
    pub(super) fn into_data(self, layer: u16) -> DataInUse<'a> {
        match self {
            LayersInUse::Fixed(layers) => DataInUse::Fixed(layers.data(layer)),
            LayersInUse::Passed(passage) => DataInUse::Passed(passage, layer),
        }
    }
}

impl Layers {
    pub(super) fn data(&self, layer: u16) -> &Arc<dyn Storage> {
        &self.images[usize::from(layer)].image.data
    }
}

impl DataInUse<'_> {
    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        match self {
            DataInUse::Fixed(storage) => storage,
            DataInUse::Passed(layers, layer) => layers.data(*layer),
        }
    }

    /// What is to be kept until a request to the storage has ended, if somebody waits for that.
    pub(crate) fn into_passage(self) -> Option<Passage<Layers>> {
        match self {
            DataInUse::Fixed(_) => None,
            DataInUse::Passed(passage, _) => Some(passage),
        }
    }
}

impl BackingChain {
    /// Bytes of memory that the index takes.
    pub(crate) fn used_bytes(&self) -> usize {
        self.look_at_index(ChainIndex::used_bytes).unwrap_or(0)
    }

    /// Drops parts of the index until so many bytes are free.
    pub(crate) fn evict(&self, wanted_bytes: usize) {
        self.look_at_index(|index| index.evict(wanted_bytes));
    }

    /// Drops what was not used since the last call.
    pub(crate) fn drop_unused(&self) {
        self.look_at_index(ChainIndex::drop_unused);
    }

    fn look_at_index<T>(&self, look: impl FnOnce(&ChainIndex) -> T) -> Option<T> {
        match &self.merged {
            Merged::Never => None,
            Merged::Once(layers) => layers.get().map(|layers| look(&layers.index)),
            Merged::PastLinks(current) => {
                let shortcut = current.lock().clone()?;
                match shortcut.enter() {
                    Entered::Passage(layers) => Some(look(&layers.index)),
                    Entered::Nothing | Entered::Ended => None,
                }
            }
        }
    }
}

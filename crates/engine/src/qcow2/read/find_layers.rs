//! Finding the images below an image whose mappings become one: at once, or for as long as links
//! lead where they do.

use std::sync::{Arc, OnceLock};

use vellum_io::sync::Mutex;

use super::chain::read_only_image;
use super::chain_index::ChainIndex;
use super::layers::{BackingChain, IndexLimits, Layer, Layers, LayersInUse, Merged};
use crate::BlockDevice;
use crate::nodes::Link;
use crate::nodes::shortcut::{Entered, Shortcut, Stretch};
use crate::qcow2::cache_budget::CacheShare;
use crate::qcow2::image::Image;

const MAX_LAYERS: usize = u16::MAX as usize;
/// Images that are open read-only, so that an index is worth while.
const MIN_LAYERS: usize = 2;
/// Clusters of the finest layer in a region: as many as an L2 slice usually maps.
const REGION_CLUSTERS: u64 = 512;
const MIN_REGION_BYTES: u64 = 256 << 10;
const MAX_REGION_BYTES: u64 = 64 << 20;

fn as_link(device: &Arc<dyn BlockDevice>) -> Option<&Link> {
    device.transparent_device()?.downcast_ref()
}

impl Layers {
    fn new(
        images: Vec<Arc<Image>>,
        rest: Option<Arc<dyn BlockDevice>>,
        limits: &IndexLimits,
    ) -> Layers {
        let clusters = images.iter().map(|one| one.geometry.cluster_size_bytes());
        let finest_bytes = clusters.min().unwrap_or(MIN_REGION_BYTES);
        let region_bytes =
            (finest_bytes * REGION_CLUSTERS).clamp(MIN_REGION_BYTES, MAX_REGION_BYTES);
        let with_form = |image: Arc<Image>| Layer {
            plain: image.reads_as_stored(),
            image,
        };
        Layers {
            images: images.into_iter().map(with_form).collect(),
            rest,
            region_bytes,
            index: ChainIndex::new(limits.budget_bytes, &limits.share),
        }
    }

    /// Those below that nothing exchanges.
    fn below(device: &Arc<dyn BlockDevice>, limits: &IndexLimits) -> Layers {
        let mut images = Vec::new();
        let mut next = Some(device.clone());
        let mut rest = None;
        while let Some(device) = next.take() {
            match read_only_image(&device) {
                Some(image) if images.len() < MAX_LAYERS => {
                    next = image.backing.clone();
                    images.push(image.clone());
                }
                _ => rest = Some(device),
            }
        }
        Layers::new(images, rest, limits)
    }

    /// Those below, past links. `None` while one of these is drained.
    fn past_links(
        device: &Arc<dyn BlockDevice>,
        limits: &IndexLimits,
    ) -> Option<Arc<Shortcut<Layers>>> {
        let shortcut = Shortcut::new();
        let mut images = Vec::new();
        let mut next = Some(device.clone());
        let mut rest = None;
        while let Some(device) = next.take() {
            let link = as_link(&device);
            let target = link.map_or_else(|| device.clone(), Link::target);
            // One with checksums may read what lies below it, through links that its reader has passed.
            let image = read_only_image(&target)
                .filter(|image| image.checksums.is_none() && images.len() < MAX_LAYERS);
            if let Some(link) = link {
                let stretch = image.map_or(Stretch::UpTo, |_| Stretch::Past);
                if !shortcut.take(link, &target, stretch) {
                    return None;
                }
            }
            match image {
                Some(image) => {
                    next = image.backing.clone();
                    images.push(image.clone());
                }
                None => rest = Some(device),
            }
        }
        let is_worth_while = images.len() >= MIN_LAYERS;
        let layers = is_worth_while.then(|| Layers::new(images, rest, limits));
        shortcut.open(layers).then_some(shortcut)
    }
}

impl BackingChain {
    /// The chain that begins with the device `below`.
    pub(crate) fn new(
        below: Option<&Arc<dyn BlockDevice>>,
        budget_bytes: usize,
        share: &Arc<CacheShare>,
    ) -> Self {
        let first = below.and_then(read_only_image);
        let second = first.and_then(|image| image.backing.as_ref());
        let merged = match below {
            Some(device) if as_link(device).is_some() => Merged::PastLinks(Mutex::new(None)),
            _ if second.and_then(read_only_image).is_some() => Merged::Once(OnceLock::new()),
            _ => Merged::Never,
        };
        BackingChain {
            below: below.cloned(),
            may_heal: first.is_some_and(|image| image.may_heal()),
            limits: IndexLimits {
                budget_bytes,
                share: share.clone(),
            },
            merged,
        }
    }

    /// The layers for a request; `None` where it has to go from image to image.
    pub(crate) fn layers(&self) -> Option<LayersInUse<'_>> {
        let below = self.below.as_ref()?;
        match &self.merged {
            Merged::Never => None,
            Merged::Once(layers) => {
                let layers = layers.get_or_init(|| Box::new(Layers::below(below, &self.limits)));
                Some(LayersInUse::Fixed(layers))
            }
            Merged::PastLinks(current) => {
                let entered = current.lock().as_ref().map(Shortcut::enter);
                match entered {
                    Some(Entered::Passage(passage)) => Some(LayersInUse::Passed(passage)),
                    Some(Entered::Nothing) => None,
                    Some(Entered::Ended) | None => self.find_way(current, below),
                }
            }
        }
    }

    /// Looks through the links below, for a request and those after it.
    fn find_way(
        &self,
        current: &Mutex<Option<Arc<Shortcut<Layers>>>>,
        below: &Arc<dyn BlockDevice>,
    ) -> Option<LayersInUse<'_>> {
        let shortcut = Layers::past_links(below, &self.limits)?;
        let entered = shortcut.enter();
        // Of two who look at once either's will do: requests of the other are counted all the same.
        let before = current.lock().replace(shortcut);
        drop(before);
        match entered {
            Entered::Passage(passage) => Some(LayersInUse::Passed(passage)),
            Entered::Nothing | Entered::Ended => None,
        }
    }
}

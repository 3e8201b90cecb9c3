//! A format of another program under the simulator.

use std::sync::Arc;

use vellum::{BlockDevice, Result, Storage};
use vellum_foreign::CheckReport;
use vellum_io::Io;

use crate::generate;
use crate::image_engine::{Files, Findings, ImageEngine};
use crate::rng::Rng;
use crate::scenario::{Backing, ImageOptions, Scenario};
use crate::sparse_bytes::SECTOR_BYTES;
use crate::storage::SimFileOptions;

use super::formats::FORMATS;

/// A request on an image, on its way.
pub(crate) type Pending<T> = std::pin::Pin<Box<dyn Future<Output = Result<T>>>>;

/// What the simulator has to know of a format.
#[derive(Debug, Clone, Copy)]
pub struct ForeignFormat {
    /// Its driver's name.
    pub name: &'static str,
    /// Logarithms of the sizes of blocks that images are made with.
    pub block_bits: &'static [u32],
    /// Images may have a backing file.
    pub has_backing: bool,
    /// Images may be encrypted.
    pub encrypts: bool,
    /// Whether images live on devices, which do not grow and are not zero before.
    pub on_devices: bool,
    pub(crate) create: fn(Arc<dyn Storage>, ImageOptions) -> Pending<()>,
    pub(crate) open: fn(Files) -> Pending<Arc<dyn BlockDevice>>,
    pub(crate) check: fn(Arc<dyn Storage>) -> Pending<CheckReport>,
    /// Damage that a cut may leave, by words of its message.
    pub(crate) harmless: &'static [&'static str],
}

impl ForeignFormat {
    /// The format of a name.
    pub fn named(name: &str) -> Option<ForeignFormat> {
        FORMATS.iter().copied().find(|format| format.name == name)
    }

    /// The scenario of a seed.
    pub fn scenario(&self, seed: u64) -> Scenario {
        let mut rng = Rng::new(seed);
        let image = self.image(&mut rng);
        let mut scenario = generate::scenario_of(image, &mut rng);
        // These are of qcow2.
        scenario.preparations.clear();
        generate::sometimes_fail(&mut scenario, seed);
        scenario
    }

    fn image(&self, rng: &mut Rng) -> ImageOptions {
        let block_bits = *rng.pick(self.block_bits);
        let block_bytes = 1 << block_bits;
        let blocks = match block_bits {
            ..=12 => rng.between(6, 60),
            13..=16 => rng.between(3, 16),
            _ => rng.between(2, 5),
        };
        let cut_off = match rng.chance(1, 3) {
            true => rng.below(block_bytes / SECTOR_BYTES) * SECTOR_BYTES,
            false => 0,
        };
        let size_bytes = blocks * block_bytes - cut_off;
        let backing = match self.has_backing && rng.chance(1, 2) {
            true => Backing::Raw(rng.between(1, size_bytes / SECTOR_BYTES) * SECTOR_BYTES),
            false => Backing::None,
        };
        ImageOptions {
            requests_only: true,
            backing,
            encrypted: self.encrypts && rng.chance(1, 3),
            tiny_cache: rng.chance(1, 2),
            traits: SimFileOptions {
                can_punch: rng.chance(3, 4),
                can_zero: rng.chance(3, 4),
                growable: !self.on_devices || !rng.chance(1, 8),
                read_only: false,
                can_clone: false,
            },
            ..ImageOptions::plain(size_bytes, block_bits)
        }
    }
}

impl ImageEngine for ForeignFormat {
    fn create(&self, files: Files, options: &ImageOptions) -> Io<()> {
        Io::boxed((self.create)(files.image, options.clone()))
    }

    fn open(&self, files: Files, _options: &ImageOptions) -> Io<Arc<dyn BlockDevice>> {
        Io::boxed((self.open)(files))
    }

    fn open_backing(&self, files: Files, options: &ImageOptions) -> Io<Arc<dyn BlockDevice>> {
        self.open(files, options)
    }

    fn check(&self, files: Files) -> Io<Findings> {
        let format = *self;
        Io::boxed(async move {
            let found = (format.check)(files.image).await?;
            let is_harmless =
                |message: &&String| format.harmless.iter().any(|words| message.contains(words));
            let harmless = found.messages.iter().filter(is_harmless).count() as u64;
            Ok(Findings {
                corruptions: found.corruptions.saturating_sub(harmless),
                check_errors: found.check_errors,
                leaks: found.leaks + harmless,
                messages: found.messages,
            })
        })
    }

    fn is_qcow2(&self) -> bool {
        false
    }
}

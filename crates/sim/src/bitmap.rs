//! The bitmaps of an image: one that is added before anything else happens, and what is
//! found of it, and of a second one, after a cut.

use std::ops::Range;
use std::sync::Arc;

use vellum::qcow2::AsQcow2;
use vellum::qcow2::{BitmapOptions, Bitmaps};

use crate::disk::Mode;
use crate::failure::{Failure, FailureKind};
use crate::image_engine::ImageEngine;
use crate::machine::Machine;
use crate::model::Model;
use crate::runtime::Runtime;
use crate::scenario::ImageOptions;

/// The name of the first bitmap of an image that the options ask for.
pub(crate) const FIRST: &str = "kept";
/// The name of the second one.
pub(crate) const SECOND: &str = "second";

/// Adds the bitmap that the options ask for to a machine's image.
pub(crate) fn add(
    engine: &Arc<dyn ImageEngine>,
    options: &ImageOptions,
    mut machine: Machine,
) -> Result<Machine, Failure> {
    let Some(bits) = options.bitmap_bits else {
        return Ok(machine);
    };
    let plugged = machine.plug(options, Mode::Instant);
    let mut runtime = Runtime::new(plugged.disk.clone(), 0);
    let (engine, options, inside) = (engine.clone(), options.clone(), plugged.clone());
    runtime.block_on(async move {
        let failed = |error| Failure::error(FailureKind::Setup, "add a bitmap", &error);
        let device = inside.open(&*engine, &options).await?;
        let new = BitmapOptions::default().granularity_bytes(Some(1 << bits));
        if let Some(image) = device.as_qcow2() {
            image.bitmaps().add(FIRST, new).await.map_err(failed)?;
        }
        device.close().await.map_err(failed)
    })??;
    runtime.finish_all();
    machine.files = plugged.contents();
    Ok(machine)
}

/// From now on what changes is to be dirty.
pub(crate) fn begin_scenario(options: &ImageOptions, model: &mut Model) {
    if options.bitmap_bits.is_some() {
        model.begin_recording(model.now());
    }
}

/// What the two bitmaps of an image hold.
pub(crate) struct Found {
    enabled: bool,
    dirty: Vec<Range<u64>>,
    second: Option<Vec<Range<u64>>>,
}

/// Reads the two bitmaps, of which the first must be there and consistent.
pub(crate) async fn find(bitmaps: &Bitmaps, names: (&str, &str)) -> Result<Found, Failure> {
    let failed = |error| Failure::error(FailureKind::Bitmap, "list", &error);
    let infos = bitmaps.list().await.map_err(failed)?;
    let info = |name| infos.iter().find(|info| info.name == name);
    let dirty = dirty_of(bitmaps, names.0).await?;
    let second = match info(names.1) {
        Some(_) => Some(dirty_of(bitmaps, names.1).await?),
        None => None,
    };
    Ok(Found {
        enabled: info(names.0).is_some_and(|info| info.auto),
        dirty,
        second,
    })
}

impl Found {
    /// Compares it with what the model knows after a cut, whose sectors were read just before.
    pub(crate) fn check(&self, model: &mut Model) -> Result<(), Failure> {
        let checked = model.match_bitmaps(self.enabled, &self.dirty, self.second.as_deref());
        checked.map_err(|message| Failure::new(FailureKind::Bitmap, message))
    }
}

async fn dirty_of(bitmaps: &Bitmaps, name: &str) -> Result<Vec<Range<u64>>, Failure> {
    let bitmap = bitmaps.read(name).await;
    let bitmap = bitmap.map_err(|error| Failure::error(FailureKind::Bitmap, name, &error))?;
    Ok(bitmap.ranges().collect())
}

//! An enabled bitmap of the image: added before anything else happens, changed now and
//! then beside the guest's requests, and looked at after every cut.
//!
//! Invariants that are checked:
//! - A sector that holds anything else than when the bitmap began to record is dirty in
//!   it; so is what had changed when it was disabled.
//! - A change of the bitmap that a cut stopped has taken effect or has not.
//! - A second bitmap, made of the first, calls dirty what the first must call dirty.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use vellum::qcow2::AsQcow2;

use vellum::BlockDevice;
use vellum::qcow2::{BitmapOptions, Bitmaps};

use crate::disk::Mode;
use crate::drive::Guest;
use crate::failure::{Failure, FailureKind};
use crate::image_engine::ImageEngine;
use crate::machine::Machine;
use crate::model::{LogicalTime, Model};
use crate::pattern::Value;
use crate::runtime::Runtime;
use crate::scenario::{BitmapChange, ImageOptions};
use crate::sparse_bytes::SECTOR_BYTES;

const FIRST: &str = "kept";
const SECOND: &str = "second";
const NAMES: (&str, &str) = (FIRST, SECOND);

/// What the bitmaps must hold, as far as that is certain.
#[derive(Debug, Clone, Default)]
pub(crate) struct Recorded {
    /// Sectors that are dirty whatever they hold now.
    must: BTreeSet<u64>,
    /// While the first bitmap records: what sectors may have held when it began to;
    /// those that are not here held what they hold untouched.
    since: Option<BTreeMap<u64, Vec<Value>>>,
    /// What the second bitmap must call dirty, if there is one.
    second: Option<BTreeSet<u64>>,
    running: Option<Running>,
}

/// A change of the bitmaps that runs.
#[derive(Debug, Clone)]
struct Running {
    change: BitmapChange,
    begun: LogicalTime,
    /// What had changed, and was dirty, when it began.
    certain: BTreeSet<u64>,
}

impl Recorded {
    /// Whether a change of the bitmaps runs.
    pub(crate) fn is_changing(&self) -> bool {
        self.running.is_some()
    }

    /// Whether the second bitmap is there.
    pub(crate) fn has_second(&self) -> bool {
        self.second.is_some()
    }

    /// The device ends earlier: what lies behind is nobody's any more.
    pub(crate) fn cut(&mut self, size_bytes: u64) {
        let end = size_bytes / SECTOR_BYTES;
        self.must.split_off(&end);
        if let Some(second) = &mut self.second {
            second.split_off(&end);
        }
    }

    /// Whether a sector that holds one of `values` has certainly changed.
    fn has_changed(&self, model: &Model, sector: u64, values: &[Value]) -> bool {
        let Some(since) = &self.since else {
            return false;
        };
        let content = |value: &Value| model.content(*value, sector);
        let untouched = [model.base(sector)];
        let before = since.get(&sector).map_or(&untouched[..], Vec::as_slice);
        let same = |now: &Value| {
            before.contains(now) || before.iter().any(|old| content(old) == content(now))
        };
        !values.iter().any(same)
    }

    /// The sectors that are certainly dirty.
    fn certain(&self, model: &Model) -> BTreeSet<u64> {
        let changed = |sector: &u64| {
            self.has_changed(model, *sector, &model.values_since(model.now(), *sector))
        };
        self.must
            .iter()
            .copied()
            .chain(model.touched().filter(changed))
            .collect()
    }

    fn begin(&mut self, change: BitmapChange, model: &Model) {
        self.running = Some(Running {
            change,
            begun: model.now(),
            certain: self.certain(model),
        });
    }

    /// The change that runs has taken effect.
    fn end(&mut self, model: &Model) {
        let Some(Running {
            change,
            begun,
            certain,
        }) = self.running.take()
        else {
            return;
        };
        match change {
            BitmapChange::Clear => {
                self.must.clear();
                self.since = self.since.take().map(|_| held_since(model, begun));
            }
            BitmapChange::Disable => {
                self.must = certain;
                self.since = None;
            }
            BitmapChange::Enable => {
                self.since.get_or_insert_with(|| held_since(model, begun));
            }
            BitmapChange::Second => {
                self.second = match self.second {
                    Some(_) => None,
                    None => Some(certain),
                };
            }
        }
    }
}

/// What the touched sectors may have held at any time since `begun`.
fn held_since(model: &Model, begun: LogicalTime) -> BTreeMap<u64, Vec<Value>> {
    model
        .touched()
        .map(|sector| (sector, model.values_since(begun, sector)))
        .collect()
}

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
    let since = options.bitmap_bits.map(|_| held_since(model, model.now()));
    model.recorded = Recorded {
        since,
        ..Recorded::default()
    };
}

/// A bitmap records since some moment after `begun`.
pub(crate) fn begin_recording(model: &mut Model, begun: LogicalTime) {
    model.recorded = Recorded {
        since: Some(held_since(model, begun)),
        ..Recorded::default()
    };
}

/// Runs `work` on what is recorded, one moment later.
fn at_next_moment<T>(model: &mut Model, work: impl FnOnce(&mut Recorded, &Model) -> T) -> T {
    model.begin_watch();
    let mut recorded = std::mem::take(&mut model.recorded);
    let done = work(&mut recorded, model);
    model.recorded = recorded;
    done
}

/// Says that a change of a bitmap begins.
pub(crate) fn begin(model: &mut Model, change: BitmapChange) {
    at_next_moment(model, |recorded, model| recorded.begin(change, model));
}

/// Says that the change has taken effect.
pub(crate) fn end(model: &mut Model) {
    at_next_moment(model, Recorded::end);
}

/// Changes a bitmap as [`begin`] said, beside the requests that run.
pub(crate) async fn change(
    guest: Rc<Guest>,
    device: Arc<dyn BlockDevice>,
    change: BitmapChange,
) -> Result<(), Failure> {
    if let (Some(bits), Some(image)) = (guest.options.bitmap_bits, device.as_qcow2()) {
        let has_second = guest.model.borrow().recorded.second.is_some();
        let applied = apply(&image.bitmaps(), change, bits, has_second).await;
        match applied {
            Ok(()) => {}
            Err(error) if guest.excuses(&error) => return Ok(()),
            Err(error) => return Err(Failure::error(FailureKind::Request, change, &error)),
        }
    }
    end(&mut guest.model.borrow_mut());
    Ok(())
}

async fn apply(
    bitmaps: &Bitmaps,
    change: BitmapChange,
    bits: u32,
    has_second: bool,
) -> vellum::Result<()> {
    match change {
        BitmapChange::Clear => bitmaps.clear(FIRST).await,
        BitmapChange::Disable => bitmaps.disable(FIRST).await,
        BitmapChange::Enable => bitmaps.enable(FIRST).await,
        BitmapChange::Second if has_second => bitmaps.remove(SECOND).await,
        BitmapChange::Second => {
            let new = BitmapOptions::default()
                .granularity_bytes(Some(1 << bits))
                .disabled(true);
            bitmaps.add(SECOND, new).await?;
            let first = bitmaps.read(FIRST).await?;
            bitmaps.merge(SECOND, vec![first]).await
        }
    }
}

/// Checks the bitmaps of an image whose sectors were read just before.
pub(crate) async fn check(guest: &Guest, device: &dyn BlockDevice) -> Result<(), Failure> {
    let (Some(_), Some(image)) = (guest.options.bitmap_bits, device.as_qcow2()) else {
        return Ok(());
    };
    let found = find(&image.bitmaps(), NAMES).await?;
    found.check(&mut guest.model.borrow_mut())
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
        let checked = at_next_moment(model, |recorded, model| {
            recorded.resolve(self.enabled, self.second.is_some(), model)?;
            recorded.check(&self.dirty, self.second.as_deref(), model)
        });
        checked.map_err(|message| Failure::new(FailureKind::Bitmap, message))
    }
}

async fn dirty_of(bitmaps: &Bitmaps, name: &str) -> Result<Vec<Range<u64>>, Failure> {
    let bitmap = bitmaps.read(name).await;
    let bitmap = bitmap.map_err(|error| Failure::error(FailureKind::Bitmap, name, &error))?;
    Ok(bitmap.ranges().collect())
}

impl Recorded {
    /// Finds out what has become of a change that a cut stopped.
    fn resolve(&mut self, enabled: bool, has_second: bool, model: &Model) -> Result<(), String> {
        let running = self.running.take();
        let change = running.as_ref().map(|running| running.change);
        let now = || held_since(model, model.now());
        match running {
            // Cleared at any moment until the cut, or not at all.
            Some(Running {
                change: BitmapChange::Clear,
                ..
            }) => {
                self.must.clear();
                self.since = self.since.take().map(|_| now());
            }
            Some(Running {
                change: BitmapChange::Disable,
                certain,
                ..
            }) if !enabled => {
                self.must = certain;
                self.since = None;
            }
            Some(Running {
                change: BitmapChange::Enable,
                ..
            }) if enabled => {
                self.since.get_or_insert_with(now);
            }
            // Added, and merged into after that.
            Some(Running {
                change: BitmapChange::Second,
                ..
            }) if has_second != self.second.is_some() => {
                self.second = has_second.then(BTreeSet::new);
            }
            _ => {}
        }
        let wanted = (self.since.is_some(), self.second.is_some());
        if wanted != (enabled, has_second) {
            return Err(format!(
                "the bitmap is enabled: {enabled}, the second there: {has_second}; \
                 wanted: {wanted:?} with {change:?} in flight"
            ));
        }
        Ok(())
    }

    fn check(
        &self,
        dirty: &[Range<u64>],
        second: Option<&[Range<u64>]>,
        model: &Model,
    ) -> Result<(), String> {
        let is_in = |ranges: &[Range<u64>], sector: u64| {
            let at = sector * SECTOR_BYTES;
            let index = ranges.partition_point(|range| range.end <= at);
            ranges.get(index).is_some_and(|range| range.start <= at)
        };
        for &sector in &self.must {
            if !is_in(dirty, sector) {
                return Err(format!(
                    "guest sector {sector} was dirty, and is clean: {dirty:?}"
                ));
            }
        }
        for sector in model.touched() {
            let values = model.values_since(model.now(), sector);
            if self.has_changed(model, sector, &values) && !is_in(dirty, sector) {
                return Err(format!(
                    "guest sector {sector} has changed, and is clean: {dirty:?}"
                ));
            }
        }
        let missing = self
            .second
            .iter()
            .flatten()
            .find(|&&sector| !is_in(second.unwrap_or_default(), sector));
        match missing {
            Some(sector) => Err(format!(
                "guest sector {sector} is clean in the second: {second:?}"
            )),
            None => Ok(()),
        }
    }
}

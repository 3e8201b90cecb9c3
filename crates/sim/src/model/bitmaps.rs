//! What the model knows of the bitmaps of an image.
//!
//! Invariants:
//! - A sector that holds anything else than when the bitmap began to record is dirty in
//!   it; so is what had changed when it was disabled.
//! - A change of the bitmap that a cut stopped has taken effect or has not.
//! - A second bitmap, made of the first, calls dirty what the first must call dirty.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::Model;
use super::sector::LogicalTime;
use crate::pattern::Value;
use crate::scenario::BitmapChange;
use crate::sparse_bytes::SECTOR_BYTES;

/// What the bitmaps must hold, as far as that is certain.
#[derive(Debug, Clone, Default)]
pub(super) struct Recorded {
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

impl Model {
    /// Whether a change of the bitmaps runs.
    pub(crate) fn is_changing_bitmaps(&self) -> bool {
        self.recorded.running.is_some()
    }

    /// Whether the second bitmap is there.
    pub(crate) fn has_second_bitmap(&self) -> bool {
        self.recorded.second.is_some()
    }

    /// A bitmap records since some moment after `begun`.
    pub(crate) fn begin_recording(&mut self, begun: LogicalTime) {
        self.recorded = Recorded {
            since: Some(held_since(self, begun)),
            ..Recorded::default()
        };
    }

    /// Says that a change of a bitmap begins.
    pub(crate) fn begin_bitmap_change(&mut self, change: BitmapChange) {
        self.at_next_moment(|recorded, model| recorded.begin(change, model));
    }

    /// Says that the change has taken effect.
    pub(crate) fn end_bitmap_change(&mut self) {
        self.at_next_moment(Recorded::end);
    }

    /// Compares the bitmaps after a power cut, and learns from them what has come about. The
    /// sectors were read just before.
    pub(crate) fn match_bitmaps(
        &mut self,
        enabled: bool,
        dirty: &[Range<u64>],
        second: Option<&[Range<u64>]>,
    ) -> Result<(), String> {
        self.at_next_moment(|recorded, model| {
            recorded.resolve(enabled, second.is_some(), model)?;
            recorded.check(dirty, second, model)
        })
    }

    /// Runs `work` on what is recorded, one moment later.
    fn at_next_moment<T>(&mut self, work: impl FnOnce(&mut Recorded, &Model) -> T) -> T {
        self.begin_watch();
        let mut recorded = std::mem::take(&mut self.recorded);
        let done = work(&mut recorded, self);
        self.recorded = recorded;
        done
    }
}

impl Recorded {
    /// The device ends earlier: what lies behind is nobody's any more.
    pub(super) fn cut(&mut self, size_bytes: u64) {
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

/// What the touched sectors may have held at any time since `begun`.
fn held_since(model: &Model, begun: LogicalTime) -> BTreeMap<u64, Vec<Value>> {
    model
        .touched()
        .map(|sector| (sector, model.values_since(begun, sector)))
        .collect()
}

//! The reference model: for every guest sector, the values it may hold.
//!
//! Invariants:
//! - A sector's *candidates* are the values it may hold now, each with the set of
//!   running changes that it already includes. They are closed under "one more
//!   running change takes effect", so racing requests may take effect in any order.
//! - When a change completes, the candidates without it go; they are *retired* with
//!   the time at which they stopped being possible.
//! - A read that began at time `t` may see a candidate or a value retired at `t` or
//!   later. After a power cut, `t` is the beginning of the last completed flush.
//! - A resize that runs may or may not have taken effect; one that has ended is durable.
//!   Sectors beyond the smallest possible size hold anything; those that a resize adds
//!   hold zeroes.
//! - A change that ends with FUA takes the values that never included it away from
//!   what a cut may show; what raced with it may still be lost.

mod bitmaps;
mod reads;
mod sector;
mod snapshots;

use std::collections::BTreeMap;
use std::ops::Range;

use crate::pattern::{self, SECTOR_LEN, Value, WriteId};
use crate::sparse_bytes::SECTOR_BYTES;
use bitmaps::Recorded;
use sector::{Candidate, Sector, sectors_of};
pub use sector::{LogicalTime, Mismatch};
pub use snapshots::Snapshot;
use snapshots::Snapshots;

/// How many changes may run at once.
pub const MAX_RUNNING: usize = 16;

/// A change of guest bytes that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Bytes of a write.
    Write(WriteId),
    /// Zeroes.
    Zeroes,
    /// Zeroes or nothing, sector by sector.
    Discard,
}

#[derive(Debug, Clone)]
struct Change {
    effect: Effect,
    range: Range<u64>,
    begun: LogicalTime,
}

/// A change that was begun; see [`Model::begin`].
#[derive(Debug, Clone, Copy)]
#[must_use = "a change that is not ended stays possible for ever"]
pub struct ChangeId(usize);

/// The values that each guest sector may hold; see the module's head.
#[derive(Debug, Clone, Default)]
pub struct Model {
    size_bytes: u64,
    /// The size that a running resize leads to.
    next_size_bytes: Option<u64>,
    /// The write that stands below the image, and how many bytes it covers.
    backing: Option<(WriteId, u64)>,
    sectors: BTreeMap<u64, Sector>,
    mixed: Vec<[u8; SECTOR_LEN]>,
    running: [Option<Change>; MAX_RUNNING],
    now: LogicalTime,
    durable_since: LogicalTime,
    next_write: WriteId,
    snapshots: Snapshots,
    /// What the bitmaps of the image must hold.
    recorded: Recorded,
}

impl Model {
    /// A device of zeroes.
    pub fn new(size_bytes: u64) -> Self {
        Model {
            size_bytes,
            next_size_bytes: None,
            backing: None,
            sectors: BTreeMap::new(),
            mixed: Vec::new(),
            running: Default::default(),
            now: 1,
            durable_since: 0,
            next_write: 1,
            snapshots: Snapshots::default(),
            recorded: Recorded::default(),
        }
    }

    /// Makes the first `len_bytes` bytes hold one write, as a backing file does
    /// through an empty overlay, and returns that write's number.
    pub fn set_backing(&mut self, len_bytes: u64) -> WriteId {
        let id = self.new_write();
        self.backing = Some((id, len_bytes));
        id
    }

    /// The device's size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The smallest size that the device may have now.
    pub fn least_size_bytes(&self) -> u64 {
        self.next_size_bytes
            .map_or(self.size_bytes, |next| next.min(self.size_bytes))
    }

    /// Whether a change that is no request runs, or ended in a way that leaves open whether it has come about.
    pub(crate) fn has_unknown_change(&self) -> bool {
        self.is_resizing() || self.is_changing_snapshots() || self.is_changing_bitmaps()
    }

    /// Whether a resize runs.
    pub fn is_resizing(&self) -> bool {
        self.next_size_bytes.is_some()
    }

    /// Begins a resize; none may run.
    pub fn begin_resize(&mut self, size_bytes: u64) {
        self.next_size_bytes = Some(size_bytes);
        self.recorded.cut(size_bytes);
    }

    /// Ends the resize that runs, or that a power cut has stopped, with the size that
    /// the device has now.
    pub fn end_resize(&mut self, size_bytes: u64) -> Result<(), Mismatch> {
        self.now += 1;
        let next = self.next_size_bytes.take();
        let old = self.size_bytes;
        if size_bytes != old && next != Some(size_bytes) {
            return Err(Mismatch {
                sector: size_bytes / SECTOR_BYTES,
                message: format!("the device has {size_bytes} bytes, not {old} or {next:?}"),
            });
        }
        self.size_bytes = size_bytes;
        if size_bytes < old {
            drop(self.sectors.split_off(&(size_bytes / SECTOR_BYTES)));
        }
        for sector in old / SECTOR_BYTES..size_bytes / SECTOR_BYTES {
            self.set_durable(sector, Value::Zero);
        }
        Ok(())
    }

    /// A number for a new write.
    pub fn new_write(&mut self) -> WriteId {
        self.next_write += 1;
        self.next_write - 1
    }

    /// The sectors that were ever changed.
    pub fn touched(&self) -> impl Iterator<Item = u64> + '_ {
        self.sectors.keys().copied()
    }

    /// Declares that a sector holds a value, durably.
    pub fn set_durable(&mut self, sector: u64, value: Value) {
        let candidates = vec![Candidate { value, includes: 0 }];
        self.sectors.insert(
            sector,
            Sector {
                candidates,
                ..Sector::default()
            },
        );
    }

    /// The only value that a sector may hold now, if there is just one.
    pub fn only_value(&self, sector: u64) -> Option<Value> {
        match self.sectors.get(&sector) {
            None => Some(self.base(sector)),
            Some(state) => match state.candidates[..] {
                [only] => Some(only.value),
                _ => None,
            },
        }
    }

    /// The time.
    pub(crate) fn now(&self) -> LogicalTime {
        self.now
    }

    /// What a sector may have held at any time since `begun`.
    pub(crate) fn values_since(&self, begun: LogicalTime, sector: u64) -> Vec<Value> {
        let Some(state) = self.sectors.get(&sector) else {
            return vec![self.base(sector)];
        };
        let retired = state.retired.iter().filter(|old| old.at >= begun);
        let candidates = state.candidates.iter();
        candidates
            .chain(retired.map(|old| &old.candidate))
            .map(|candidate| candidate.value)
            .collect()
    }

    /// The 512 bytes of a value in a sector.
    pub fn content(&self, value: Value, sector: u64) -> [u8; SECTOR_LEN] {
        let mut bytes = [0; SECTOR_LEN];
        match value {
            Value::Zero => {}
            Value::Written(id) => pattern::fill(id, sector * SECTOR_BYTES, &mut bytes),
            Value::Mixed(index) => bytes = self.mixed[index as usize],
        }
        bytes
    }

    /// Begins a change of a byte range: from now on it may have taken effect.
    ///
    /// # Panics
    /// If [`MAX_RUNNING`] changes run already.
    pub fn begin(&mut self, effect: Effect, range: Range<u64>) -> ChangeId {
        self.now += 1;
        let slot = self.running.iter().position(Option::is_none);
        let slot = slot.expect("the driver limits the requests in flight");
        self.running[slot] = Some(Change {
            effect,
            range: range.clone(),
            begun: self.now,
        });
        for sector in sectors_of(&range) {
            let mut state = self
                .sectors
                .remove(&sector)
                .unwrap_or_else(|| self.untouched(sector));
            self.close(sector, &mut state.candidates);
            state.changed_at = self.now;
            self.sectors.insert(sector, state);
        }
        ChangeId(slot)
    }

    /// Ends a change: from now on it has taken effect, durably if `fua`.
    pub fn end(&mut self, ticket: ChangeId, fua: bool) {
        self.now += 1;
        let Some(change) = self.running[ticket.0].take() else {
            return;
        };
        let bit = 1 << ticket.0;
        for sector in sectors_of(&change.range) {
            let Some(state) = self.sectors.get_mut(&sector) else {
                continue;
            };
            let before = std::mem::take(&mut state.candidates);
            for mut candidate in before.iter().copied().filter(|c| c.includes & bit != 0) {
                candidate.includes &= !bit;
                if !state.candidates.contains(&candidate) {
                    state.candidates.push(candidate);
                }
            }
            state.retire(&before, self.now);
            state.changed_at = self.now;
            for retired in state.retired.iter_mut().filter(|_| fua) {
                let included = retired.at > change.begun && retired.candidate.includes & bit != 0;
                retired.gone |= !included;
            }
        }
    }

    /// Ends a change that failed: it may have taken effect or not.
    pub fn abandon(&mut self, ticket: ChangeId) {
        self.now += 1;
        let Some(change) = self.running[ticket.0].take() else {
            return;
        };
        for sector in sectors_of(&change.range) {
            let Some(state) = self.sectors.get_mut(&sector) else {
                continue;
            };
            for mut candidate in std::mem::take(&mut state.candidates) {
                candidate.includes &= !(1 << ticket.0);
                if !state.candidates.contains(&candidate) {
                    state.candidates.push(candidate);
                }
            }
            state.changed_at = self.now;
        }
    }

    /// Whether no change runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.iter().all(Option::is_none)
    }

    /// Begins a flush or a read.
    pub fn begin_watch(&mut self) -> LogicalTime {
        self.now += 1;
        self.now
    }

    /// Ends a flush: what was complete when it began is durable.
    pub fn end_flush(&mut self, begun: LogicalTime) {
        self.now += 1;
        self.durable_since = self.durable_since.max(begun);
    }

    /// The model of the device after a power cut, before anything was read.
    ///
    /// Each sector may hold what it may have held since the last completed flush.
    #[must_use]
    pub fn after_cut(&self) -> Model {
        let mut after = self.clone();
        after.running = Default::default();
        for state in after.sectors.values_mut() {
            let since = self.durable_since;
            let mut values: Vec<Value> = state.candidates.iter().map(|c| c.value).collect();
            let possible = state
                .retired
                .iter()
                .filter(|old| old.at >= since && !old.gone);
            values.extend(possible.map(|old| old.candidate.value));
            values.sort_unstable();
            values.dedup();
            let candidates = values
                .into_iter()
                .map(|value| Candidate { value, includes: 0 });
            *state = Sector {
                candidates: candidates.collect(),
                ..Sector::default()
            };
        }
        after.cut_snapshots(self);
        after
    }

    /// Makes everything as it is now durable, so that no cut can undo it.
    pub fn make_durable(&mut self) {
        self.sectors
            .values_mut()
            .for_each(|state| state.retired.clear());
    }

    /// What a sector holds that was never changed.
    pub(crate) fn base(&self, sector: u64) -> Value {
        match self.backing {
            Some((id, len_bytes)) if (sector + 1) * SECTOR_BYTES <= len_bytes => Value::Written(id),
            _ => Value::Zero,
        }
    }

    fn untouched(&self, sector: u64) -> Sector {
        let candidates = vec![Candidate {
            value: self.base(sector),
            includes: 0,
        }];
        Sector {
            candidates,
            ..Sector::default()
        }
    }

    /// Adds every candidate that one more running change makes of another.
    fn close(&mut self, sector: u64, candidates: &mut Vec<Candidate>) {
        let mut at = 0;
        while at < candidates.len() {
            let from = candidates[at];
            for slot in 0..MAX_RUNNING {
                let bit = 1 << slot;
                let Some(change) = &self.running[slot] else {
                    continue;
                };
                if from.includes & bit != 0 || !sectors_of(&change.range).contains(&sector) {
                    continue;
                }
                let change = change.clone();
                let includes = from.includes | bit;
                for value in self.apply(&change, sector, from.value) {
                    let next = Candidate { value, includes };
                    if !candidates.contains(&next) {
                        candidates.push(next);
                    }
                }
            }
            at += 1;
        }
    }

    /// What a change may make of a value.
    fn apply(&mut self, change: &Change, sector: u64, value: Value) -> Vec<Value> {
        let start = sector * SECTOR_BYTES;
        let (from, to) = (
            change.range.start.max(start),
            change.range.end.min(start + SECTOR_BYTES),
        );
        let whole = to - from == SECTOR_BYTES;
        match (change.effect, whole) {
            (Effect::Write(id), true) => vec![Value::Written(id)],
            (Effect::Zeroes, true) => vec![Value::Zero],
            (Effect::Discard, true) => vec![value, Value::Zero],
            (Effect::Discard, false) => vec![value],
            (effect, false) => {
                let mut bytes = self.content(value, sector);
                let part = &mut bytes[(from - start) as usize..(to - start) as usize];
                match effect {
                    Effect::Write(id) => pattern::fill(id, from, part),
                    _ => part.fill(0),
                }
                vec![self.intern(bytes)]
            }
        }
    }

    fn intern(&mut self, bytes: [u8; SECTOR_LEN]) -> Value {
        if bytes.iter().all(|&byte| byte == 0) {
            return Value::Zero;
        }
        // The newest are the likeliest; there are few.
        let index = self
            .mixed
            .iter()
            .rposition(|known| *known == bytes)
            .unwrap_or_else(|| {
                self.mixed.push(bytes);
                self.mixed.len() - 1
            });
        Value::Mixed(index as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(id: WriteId, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        pattern::fill(id, offset, &mut bytes);
        bytes
    }

    fn sees(model: &Model, sector: u64, bytes: &[u8]) -> bool {
        let mut copy = model.clone();
        let begun = copy.begin_watch();
        copy.end_read(begun, sector * 512, bytes).is_ok()
    }

    fn write(model: &mut Model, range: Range<u64>) -> WriteId {
        let id = model.new_write();
        let ticket = model.begin(Effect::Write(id), range);
        model.end(ticket, false);
        id
    }

    #[test]
    fn a_completed_write_replaces_what_was_before() {
        let mut model = Model::new(4096);
        let id = write(&mut model, 512..1024);
        assert!(sees(&model, 1, &bytes_of(id, 512, 512)));
        assert!(!sees(&model, 1, &[0; 512]));
        assert!(sees(&model, 0, &[0; 512]));
        assert!(!sees(&model, 0, &bytes_of(id, 512, 512)));
    }

    #[test]
    fn a_cut_may_lose_unflushed_writes_and_no_others() {
        let mut model = Model::new(4096);
        let first = write(&mut model, 0..512);
        let flush = model.begin_watch();
        let second = write(&mut model, 0..512);
        model.end_flush(flush);
        let third = write(&mut model, 0..512);
        let after = model.after_cut();
        assert!(!sees(&after, 0, &[0; 512]));
        for id in [first, second, third] {
            assert!(sees(&after, 0, &bytes_of(id, 0, 512)));
        }
        let flush = model.begin_watch();
        model.end_flush(flush);
        assert!(!sees(&model.after_cut(), 0, &bytes_of(second, 0, 512)));
        assert!(sees(&model.after_cut(), 0, &bytes_of(third, 0, 512)));
    }

    #[test]
    fn a_write_with_fua_is_durable_alone() {
        let mut model = Model::new(4096);
        let id = model.new_write();
        let ticket = model.begin(Effect::Write(id), 0..512);
        assert!(sees(&model.after_cut(), 0, &[0; 512]));
        model.end(ticket, true);
        assert!(!sees(&model.after_cut(), 0, &[0; 512]));
        assert!(sees(&model.after_cut(), 0, &bytes_of(id, 0, 512)));
    }

    #[test]
    fn what_raced_with_fua_may_still_be_lost() {
        let mut model = Model::new(4096);
        let (durable, racing) = (model.new_write(), model.new_write());
        let first = model.begin(Effect::Write(durable), 0..512);
        let second = model.begin(Effect::Write(racing), 0..512);
        model.end(second, false);
        model.end(first, true);
        let after = model.after_cut();
        assert!(sees(&after, 0, &bytes_of(durable, 0, 512)));
        assert!(sees(&after, 0, &bytes_of(racing, 0, 512)));
        assert!(!sees(&after, 0, &[0; 512]));
    }

    #[test]
    fn racing_writes_end_in_any_order_but_both_take_effect() {
        let mut model = Model::new(4096);
        let (a, b) = (model.new_write(), model.new_write());
        let first = model.begin(Effect::Write(a), 0..100);
        let second = model.begin(Effect::Write(b), 50..512);
        let mut a_last = bytes_of(b, 0, 512);
        a_last[..100].copy_from_slice(&bytes_of(a, 0, 100));
        let mut b_last = a_last.clone();
        b_last[50..].copy_from_slice(&bytes_of(b, 50, 462));
        model.end(first, false);
        assert!(!sees(&model, 0, &[0; 512]));
        model.end(second, false);
        assert!(sees(&model, 0, &a_last) && sees(&model, 0, &b_last));
        let mut lost = vec![0; 512];
        lost[..100].copy_from_slice(&bytes_of(a, 0, 100));
        assert!(!sees(&model, 0, &lost));
        let begun = model.begin_watch();
        model.end_read(begun, 0, &a_last).unwrap();
        assert!(!sees(&model, 0, &b_last), "what was seen must stay");
    }

    #[test]
    fn a_discard_gives_old_or_zero() {
        let mut model = Model::new(4096);
        let id = write(&mut model, 0..1024);
        let ticket = model.begin(Effect::Discard, 0..1000);
        model.end(ticket, false);
        assert!(sees(&model, 0, &[0; 512]) && sees(&model, 0, &bytes_of(id, 0, 512)));
        assert!(!sees(&model, 1, &[0; 512]));
    }

    #[test]
    fn a_backing_file_shows_where_it_reaches() {
        let mut model = Model::new(4096);
        let id = model.set_backing(512);
        assert!(sees(&model, 0, &bytes_of(id, 0, 512)));
        assert!(sees(&model, 1, &[0; 512]));
        assert_eq!(model.only_value(0), Some(Value::Written(id)));
    }
}

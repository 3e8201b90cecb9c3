//! What the model knows of internal snapshots.
//!
//! Invariants:
//! - What a snapshot holds never changes. Taking one is like reading the whole device:
//!   of requests that run beside it each sector may have the value before or after.
//! - After an apply each sector holds what the snapshot holds, durably. A power cut
//!   during one leaves all of the old disk, or all of the snapshot.
//! - A power cut while a snapshot is taken or deleted leaves it there or not; every
//!   other snapshot is there.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Model;
use super::sector::{Candidate, LogicalTime, Mismatch, Sector, pieces};
use crate::pattern::Value;
use crate::sparse_bytes::SECTOR_BYTES;

/// A snapshot, and what each of its sectors may hold.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Its identifier.
    pub id: String,
    /// The size of the disk in it.
    pub size_bytes: u64,
    /// The sectors that were ever changed before it.
    sectors: BTreeMap<u64, Vec<Value>>,
    /// It was made before the scenario began.
    prepared: bool,
    /// What it shows of the backing file may have changed, so nobody knows what it holds.
    blurred: bool,
}

impl Snapshot {
    /// The sectors that were ever changed before it was taken.
    pub fn touched(&self) -> impl Iterator<Item = u64> + '_ {
        self.sectors.keys().copied()
    }

    /// Whether it is known what it holds.
    pub fn is_known(&self) -> bool {
        !self.blurred
    }
}

/// A change of the snapshots that runs, or that a power cut has stopped.
#[derive(Debug, Clone)]
enum Pending {
    Taking(LogicalTime),
    /// As it would be if it had come about.
    Taken(Arc<Snapshot>),
    Applying(usize),
    Applied(Box<Model>),
    Deleting(usize),
}

/// The snapshots of a device.
#[derive(Debug, Clone, Default)]
pub(super) struct Snapshots {
    held: Vec<Arc<Snapshot>>,
    pending: Option<Pending>,
    /// The one that was made before the scenario began may be gone, or lie elsewhere.
    thawed: bool,
}

impl Model {
    /// The snapshots that are certainly there.
    pub fn snapshots(&self) -> &[Arc<Snapshot>] {
        &self.snapshots.held
    }

    /// Whether a change of the snapshots runs.
    pub fn is_changing_snapshots(&self) -> bool {
        self.snapshots.pending.is_some()
    }

    /// Notes that what snapshots refer to may be moved. What they show stays the same.
    pub fn thaw(&mut self) {
        self.snapshots.thawed = true;
    }

    /// Whether the snapshot that was made before the scenario began may be gone, or lie elsewhere.
    pub fn is_thawed(&self) -> bool {
        self.snapshots.thawed
    }

    /// Notes a snapshot of the device as it is, made before the scenario begins.
    pub fn add_prepared_snapshot(&mut self, id: &str) {
        let mut snapshot = self.capture(self.now);
        snapshot.id = id.to_owned();
        snapshot.prepared = true;
        self.snapshots.held.push(Arc::new(snapshot));
    }

    /// Notes that what stands below the image changes, or goes away: all snapshots show
    /// that as well.
    pub fn blur_snapshots(&mut self) {
        for snapshot in &mut self.snapshots.held {
            Arc::make_mut(snapshot).blurred = true;
        }
    }

    /// What a snapshot may hold that was begun at `begun` and ends now.
    fn capture(&self, begun: LogicalTime) -> Snapshot {
        let values = |state: &Sector| {
            let now = state.candidates.iter().map(|candidate| candidate.value);
            let before = state.retired.iter().filter(|old| old.at >= begun);
            let mut values: Vec<Value> = now.chain(before.map(|old| old.candidate.value)).collect();
            values.sort_unstable();
            values.dedup();
            values
        };
        let sectors = self.sectors.iter();
        Snapshot {
            id: String::new(),
            size_bytes: self.size_bytes,
            sectors: sectors.map(|(at, state)| (*at, values(state))).collect(),
            prepared: false,
            blurred: false,
        }
    }

    /// Begins to take a snapshot; no other change of the snapshots may run, nor a
    /// resize.
    pub fn begin_snapshot(&mut self) {
        self.now += 1;
        self.snapshots.pending = Some(Pending::Taking(self.now));
    }

    /// Ends taking one: it has this identifier, or could not be taken.
    pub fn end_snapshot(&mut self, id: Option<String>) {
        self.now += 1;
        let pending = self.snapshots.pending.take();
        if let (Some(Pending::Taking(begun)), Some(id)) = (pending, id) {
            let taken = Snapshot {
                id,
                ..self.capture(begun)
            };
            self.snapshots.held.push(Arc::new(taken));
            self.end_flush(begun);
        }
    }

    /// Begins to apply a snapshot; nothing else may run.
    pub fn begin_apply(&mut self, index: usize) {
        self.snapshots.pending = Some(Pending::Applying(index));
    }

    /// Ends applying it, if that was possible.
    pub fn end_apply(&mut self, applied: bool) {
        self.now += 1;
        if let Some(Pending::Applying(index)) = self.snapshots.pending.take()
            && applied
        {
            *self = self.applied(index);
        }
    }

    /// Begins to delete a snapshot.
    pub fn begin_delete(&mut self, index: usize) {
        self.now += 1;
        self.snapshots.thawed |= self.snapshots.held[index].prepared;
        self.snapshots.pending = Some(Pending::Deleting(index));
    }

    /// Ends deleting it, if that was possible.
    pub fn end_delete(&mut self, deleted: bool) {
        self.now += 1;
        if let Some(Pending::Deleting(index)) = self.snapshots.pending.take()
            && deleted
        {
            self.snapshots.held.remove(index);
        }
    }

    /// The device after a snapshot was applied.
    fn applied(&self, index: usize) -> Model {
        let snapshot = self.snapshots.held[index].clone();
        let mut after = self.clone();
        after.snapshots.pending = None;
        after.size_bytes = snapshot.size_bytes;
        after.sectors.clear();
        // What was changed since must be looked at too.
        for sector in self.touched() {
            if sector < snapshot.size_bytes / SECTOR_BYTES {
                after.set_durable(sector, self.base(sector));
            }
        }
        for (&sector, values) in &snapshot.sectors {
            let candidate = |&value: &Value| Candidate { value, includes: 0 };
            let state = Sector {
                candidates: values.iter().map(candidate).collect(),
                ..Sector::default()
            };
            after.sectors.insert(sector, state);
        }
        after
    }

    /// After a power cut in the state `before`: what runs may have come about or not.
    pub(super) fn cut_snapshots(&mut self, before: &Model) {
        self.snapshots.pending = match before.snapshots.pending {
            Some(Pending::Taking(begun)) => Some(Pending::Taken(Arc::new(before.capture(begun)))),
            Some(Pending::Applying(index)) => Some(Pending::Applied(Box::new(self.applied(index)))),
            _ => self.snapshots.pending.take(),
        };
    }

    /// The device as it is if an apply that a power cut has stopped had come about.
    pub fn take_applied(&mut self) -> Option<Model> {
        match self.snapshots.pending.take() {
            Some(Pending::Applied(applied)) => Some(*applied),
            pending => {
                self.snapshots.pending = pending;
                None
            }
        }
    }

    /// Learns the size of the device after a power cut: that of a resize, or of an
    /// apply that has come about.
    pub fn end_cut(&mut self, size_bytes: u64) -> Result<(), Mismatch> {
        if let Some(Pending::Applied(applied)) = &self.snapshots.pending
            && size_bytes != self.size_bytes
            && size_bytes == applied.size_bytes
            && let Some(applied) = self.take_applied()
        {
            *self = applied;
        }
        self.end_resize(size_bytes)
    }

    /// Compares the identifiers of an image's snapshots after a power cut, and learns
    /// from them what has come about.
    pub fn match_snapshots(&mut self, found: &[String]) -> Result<(), Mismatch> {
        let held: Vec<String> = self.snapshots.held.iter().map(|s| s.id.clone()).collect();
        let snapshots = &mut self.snapshots;
        match snapshots.pending.take() {
            Some(Pending::Taken(taken))
                if found.len() == held.len() + 1 && found.starts_with(&held) =>
            {
                snapshots.held.push(Arc::new(Snapshot {
                    id: found[held.len()].clone(),
                    ..Snapshot::clone(&taken)
                }));
                return Ok(());
            }
            Some(Pending::Deleting(index)) if found != held => {
                snapshots.held.remove(index);
            }
            Some(Pending::Applied(applied)) => {
                snapshots.pending = Some(Pending::Applied(applied));
            }
            _ => {}
        }
        let held: Vec<&String> = snapshots.held.iter().map(|snapshot| &snapshot.id).collect();
        if held.iter().copied().eq(found) {
            return Ok(());
        }
        Err(Mismatch {
            sector: 0,
            message: format!("the image has the snapshots {found:?}, not {held:?}"),
        })
    }

    /// Checks bytes that were read from a snapshot.
    pub fn check_snapshot(
        &self,
        snapshot: &Snapshot,
        offset_bytes: u64,
        bytes: &[u8],
    ) -> Result<(), Mismatch> {
        for (sector, start, part) in pieces(offset_bytes, bytes) {
            let base = [self.base(sector)];
            let allowed = snapshot
                .sectors
                .get(&sector)
                .map_or(&base[..], Vec::as_slice);
            if !allowed.iter().any(|&value| self.holds(value, start, part)) {
                let mut wrong = self.mismatch(sector, part, allowed);
                wrong.message = format!("snapshot {}: {}", snapshot.id, wrong.message);
                return Err(wrong);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Effect;
    use super::*;
    use crate::pattern;

    fn write(model: &mut Model) -> Vec<u8> {
        let id = model.new_write();
        let ticket = model.begin(Effect::Write(id), 0..512);
        model.end(ticket, false);
        let mut bytes = vec![0; 512];
        pattern::fill(id, 0, &mut bytes);
        bytes
    }

    fn sees(model: &Model, bytes: &[u8]) -> bool {
        let mut copy = model.clone();
        let begun = copy.begin_watch();
        copy.end_read(begun, 0, bytes).is_ok()
    }

    fn taken(model: &mut Model, id: &str) -> Arc<Snapshot> {
        model.begin_snapshot();
        model.end_snapshot(Some(id.to_owned()));
        model.snapshots().last().unwrap().clone()
    }

    #[test]
    fn a_snapshot_keeps_what_the_disk_held() {
        let mut model = Model::new(4096);
        let old = write(&mut model);
        let snapshot = taken(&mut model, "1");
        let new = write(&mut model);
        assert!(model.check_snapshot(&snapshot, 0, &old).is_ok());
        assert!(model.check_snapshot(&snapshot, 0, &new).is_err());
        model.begin_apply(0);
        let mut cut = model.after_cut();
        assert!(sees(&cut, &new) && sees(&cut, &old), "not flushed");
        let applied = cut.take_applied().unwrap();
        assert!(sees(&applied, &old) && !sees(&applied, &new));
        model.end_apply(true);
        assert!(sees(&model.after_cut(), &old) && !sees(&model.after_cut(), &new));
    }

    #[test]
    fn writes_beside_a_snapshot_may_be_in_it() {
        let mut model = Model::new(4096);
        let before = write(&mut model);
        model.begin_snapshot();
        let during = write(&mut model);
        model.end_snapshot(Some("1".into()));
        let after = write(&mut model);
        let snapshot = model.snapshots()[0].clone();
        let holds = |bytes: &[u8]| model.check_snapshot(&snapshot, 0, bytes).is_ok();
        assert!(holds(&before) && holds(&during) && !holds(&after));
    }

    #[test]
    fn a_cut_leaves_changes_of_the_list_done_or_undone() {
        let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
        let mut model = Model::new(4096);
        taken(&mut model, "1");
        model.begin_snapshot();
        for (found, allowed) in [(&["1"][..], true), (&["1", "2"], true), (&["2"], false)] {
            let matched = model.after_cut().match_snapshots(&ids(found));
            assert_eq!(matched.is_ok(), allowed, "{found:?}");
        }
        model.end_snapshot(None);
        model.begin_delete(0);
        for (found, allowed) in [(&["1"][..], true), (&[], true), (&["2"], false)] {
            let matched = model.after_cut().match_snapshots(&ids(found));
            assert_eq!(matched.is_ok(), allowed, "{found:?}");
        }
    }
}

//! Where new metadata may be put: in clusters that nothing refers to *and* that are
//! counted as free, or behind the end of the file, where nothing points either: what reads
//! as zeroes there goes on doing so. What only one of the two calls
//! free may be what the other has lost. Only where the storage cannot grow and has
//! none of these are clusters taken that nothing refers to, whatever their count.

use super::outcome::Outcome;
use super::source::Image;
use crate::{Error, ErrorKind, Result};

const ENOSPC: i32 = 28;

/// Finds places for new clusters, in ascending order.
pub(super) struct Places {
    /// Below this one everything has been looked at.
    next: u64,
    /// Clusters that there may be.
    most: u64,
    /// There was no cluster that is free by both calls.
    loose: bool,
}

impl Places {
    pub(super) fn new(image: &Image) -> Self {
        let growable = image.storage.capabilities().growable;
        let most = image.len_bytes() >> image.geometry.cluster_bits;
        Places {
            next: 0,
            most: if growable { u64::MAX } else { most },
            loose: false,
        }
    }

    /// `count` clusters side by side, from `from` on where there are such, and from
    /// where the last call has stopped.
    pub(super) fn take(
        &mut self,
        outcome: &mut Outcome,
        from: u64,
        count: u64,
        usable: impl Fn(u64) -> bool,
    ) -> Result<u64> {
        self.next = self.next.max(from);
        let mut found = self.find(outcome, count, &usable);
        if found.is_none() && !self.loose {
            self.loose = true;
            self.next = from;
            found = self.find(outcome, count, &usable);
        }
        match found {
            Some(first) => Ok(reserve(outcome, first, count)),
            None => {
                let message = "no room for the new refcounts";
                Err(Error::new(ErrorKind::NoSpace, "check", message).with_errno(ENOSPC))
            }
        }
    }

    fn find(
        &mut self,
        outcome: &Outcome,
        count: u64,
        usable: &impl Fn(u64) -> bool,
    ) -> Option<u64> {
        let end = outcome.tally.clusters;
        let mut run = 0;
        while self.next < end {
            let free =
                self.next < self.most && self.is_free(outcome, self.next) && usable(self.next);
            self.next += 1;
            run = if free { run + 1 } else { 0 };
            if run == count {
                return Some(self.next - count);
            }
        }
        // A run of free clusters at the end of the file may begin the place.
        let mut next = end;
        while run < count {
            if next >= self.most || !outcome.tally.is_known(next) {
                return None;
            }
            let free = outcome.tally.is_free(next);
            next += 1;
            run = if free { run + 1 } else { 0 };
        }
        self.next = next;
        Some(next - count)
    }

    fn is_free(&self, outcome: &Outcome, cluster: u64) -> bool {
        let counted_free = self.loose || outcome.stored.get(cluster) == Some(0);
        counted_free && outcome.tally.is_free(cluster)
    }
}

fn reserve(outcome: &mut Outcome, first: u64, count: u64) -> u64 {
    outcome.tally.grow(first + count);
    (first..first + count).for_each(|cluster| outcome.tally.references.set(cluster, 1));
    first
}

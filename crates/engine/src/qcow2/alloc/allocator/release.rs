//! Clusters that nobody uses any more: their counts go down, now or later.

use std::ops::Range;

use vellum_format::types::HostCluster;
use vellum_io::{ErrorKind, Result};
use vellum_storage::Event;

use super::{Allocator, State};
use crate::debug_events::emit;

impl Allocator {
    /// Lowers the counts of a run of clusters that no durable mapping and no
    /// request uses any more. Where counts cannot be read now, that is done later,
    /// by the next release or when the image is closed.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] if a count is zero already.
    pub(crate) async fn release(&self, start: HostCluster, count: u64) -> Result<()> {
        emit(&self.refcounts.file, Event::ClusterFree).await;
        let mut deferred = std::mem::take(&mut self.state().deferred_decrements);
        deferred.push(start.index()..start.index() + count);
        self.decrement(deferred).await
    }

    /// Lowers the counts of these clusters by one each.
    pub(in crate::qcow2) async fn decrement(&self, deferred: Vec<Range<u64>>) -> Result<()> {
        let mut outcome = Ok(());
        for mut clusters in deferred {
            while !clusters.is_empty() {
                match self.refcounts.lower_in_slice(clusters.clone()).await {
                    Ok(lowered) => {
                        clusters.start += lowered.clusters;
                        lowered
                            .freed
                            .into_iter()
                            .for_each(|freed| self.note_free(freed));
                    }
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        outcome = Err(error);
                        break;
                    }
                    Err(_) => {
                        self.state().deferred_decrements.push(clusters);
                        break;
                    }
                }
            }
        }
        outcome
    }

    /// Enters clusters whose counts are zero.
    pub(in crate::qcow2) fn note_free(&self, clusters: Range<u64>) {
        let mut state = self.state();
        let beyond = clusters.start.max(state.tail)..clusters.end;
        if !beyond.is_empty() {
            state.note_used_beyond(beyond);
        }
        state.insert_free(clusters);
        state.room.note_change();
    }
}

impl State {
    fn note_used_beyond(&mut self, clusters: Range<u64>) {
        let mut written = self.written_beyond.iter();
        if !written.any(|known| known.start <= clusters.start && clusters.end <= known.end) {
            self.written_beyond.push(clusters);
        }
    }

    /// Whether a cluster beyond the tail has been in use since the image was opened: where
    /// something leads there now, it is counted.
    pub(in crate::qcow2) fn was_used_beyond(&self, cluster: u64) -> bool {
        let mut written = self.written_beyond.iter();
        written.any(|clusters| clusters.contains(&cluster))
    }
}

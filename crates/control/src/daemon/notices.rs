//! Events that come from other lanes than the one of the monitors: requests end wherever an export
//! is served.
//!
//! Invariants:
//! - Whoever posts an event never waits.
//! - Memory is bounded: where nobody takes events for a while, the newest are dropped.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use event_listener::Event;
use parking_lot::Mutex;
use serde_json::{Value, json};
use vellum::nodes::{QuorumOperation, QuorumReport};
use vellum_export::accounting::{FailedRequest, Operation};
use vellum_io::lane;

use super::events::Events;
use crate::nodes::NodeNotice;

/// In events offsets are told in these.
const SECTOR_BYTES: u64 = 512;
/// So many events wait at most.
const MOST_EVENTS: usize = 1024;
/// Of the failures of one export one is told in this time, as in QEMU.
const FAILURE_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Queue {
    events: Mutex<VecDeque<(&'static str, Value)>>,
    posted: Event,
}

/// Where events are posted from any thread; clones post to the same place.
#[derive(Debug, Clone, Default)]
pub(super) struct Notices(Arc<Queue>);

impl Notices {
    fn post(&self, name: &'static str, data: Value) {
        let mut events = self.0.events.lock();
        if events.len() < MOST_EVENTS {
            events.push_back((name, data));
            drop(events);
            self.0.posted.notify(usize::MAX);
        }
    }

    /// Emits what is posted; never ends.
    pub(super) async fn forward(self, events: Events) {
        loop {
            let posted = self.0.posted.listen();
            loop {
                let next = self.0.events.lock().pop_front();
                let Some((name, data)) = next else { break };
                events.emit(name, data);
            }
            posted.await;
        }
    }

    /// Posts what has happened to a node.
    pub(super) fn of_node(&self, notice: NodeNotice) {
        match notice {
            NodeNotice::WriteThreshold {
                node,
                threshold_bytes,
                exceeded_bytes,
            } => self.post(
                "BLOCK_WRITE_THRESHOLD",
                json!({
                    "node-name": node,
                    "write-threshold": threshold_bytes,
                    "amount-exceeded": exceeded_bytes,
                }),
            ),
            NodeNotice::Quorum { node, report } => self.of_quorum(&node, report),
            NodeNotice::Corrupted {
                node,
                message,
                offset_bytes,
                is_fatal,
            } => {
                let mut data = json!({
                    "device": "",
                    "node-name": node,
                    "msg": message,
                    "fatal": is_fatal,
                });
                if let Some(offset_bytes) = offset_bytes {
                    data["offset"] = json!(offset_bytes);
                }
                self.post("BLOCK_IMAGE_CORRUPTED", data);
            }
        }
    }

    fn of_quorum(&self, node: &str, report: QuorumReport) {
        // In sectors, as events have it.
        let place = |range: &Range<u64>| {
            let first = range.start / SECTOR_BYTES;
            (first, range.end.div_ceil(SECTOR_BYTES) - first)
        };
        match report {
            QuorumReport::Failure { range } => {
                let (first, count) = place(&range);
                let data = json!({"reference": node, "sector-num": first, "sectors-count": count});
                self.post("QUORUM_FAILURE", data);
            }
            QuorumReport::Bad {
                child,
                operation,
                range,
                error,
            } => {
                let (first, count) = place(&range);
                let kind = match operation {
                    QuorumOperation::Read => "read",
                    QuorumOperation::Write => "write",
                    QuorumOperation::Flush => "flush",
                };
                let mut data = json!({
                    "type": kind,
                    "node-name": child,
                    "sector-num": first,
                    "sectors-count": count,
                });
                if let Some(error) = error {
                    data["error"] = json!(error);
                }
                self.post("QUORUM_REPORT_BAD", data);
            }
        }
    }

    /// What hears of the failed requests of the export `id`, which was made for `node`.
    pub(super) fn of_export(
        &self,
        id: &str,
        node: &str,
    ) -> impl Fn(&FailedRequest<'_>) + Send + Sync + 'static {
        let (notices, id, node) = (self.clone(), id.to_owned(), node.to_owned());
        let last = Mutex::new(None::<Instant>);
        move |failed| {
            let now = lane::now();
            let mut last = last.lock();
            if last.is_some_and(|last| now.saturating_duration_since(last) < FAILURE_INTERVAL) {
                return;
            }
            *last = Some(now);
            let operation = match failed.operation {
                Operation::Read => "read",
                Operation::Write | Operation::Flush | Operation::Discard => "write",
            };
            notices.post(
                "BLOCK_IO_ERROR",
                json!({
                    "device": id,
                    "qom-path": "",
                    "node-name": node,
                    "operation": operation,
                    "action": "report",
                    "nospace": failed.errno == libc::ENOSPC,
                    "reason": failed.reason,
                }),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn posted(notices: &Notices) -> Vec<(&'static str, Value)> {
        notices.0.events.lock().drain(..).collect()
    }

    #[test]
    fn of_many_failures_one_is_told_and_no_memory_grows() {
        let notices = Notices::default();
        let hear = notices.of_export("e", "n");
        let failed = FailedRequest {
            operation: Operation::Flush,
            errno: libc::ENOSPC,
            reason: "No space left on device",
        };
        (0..1000).for_each(|_| hear(&failed));
        let events = posted(&notices);
        let [(name, data)] = &events[..] else {
            panic!("{events:?}");
        };
        assert_eq!(*name, "BLOCK_IO_ERROR");
        assert_eq!(
            (&data["operation"], &data["nospace"]),
            (&json!("write"), &json!(true))
        );
        for _ in 0..2 * MOST_EVENTS {
            notices.of_node(NodeNotice::WriteThreshold {
                node: "f".to_owned(),
                threshold_bytes: 1,
                exceeded_bytes: 2,
            });
        }
        assert_eq!(posted(&notices).len(), MOST_EVENTS);
    }
}

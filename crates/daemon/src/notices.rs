//! Events that come from other lanes than the one of the monitors: requests end wherever an export
//! is served.
//!
//! Invariants:
//! - Whoever posts an event never waits.
//! - Memory is bounded: where nobody takes events for a while, the newest are dropped.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use event_listener::Event;
use futures_util::future::select;
use parking_lot::Mutex;
use serde_json::{Value, json};
use vellum::Error;
use vellum::nodes::{QuorumOperation, QuorumReport};
use vellum_export::RoomNotice;
use vellum_export::accounting::{FailedRequest, Operation};
use vellum_graph::live::NodeNotice;
use vellum_io::error::errno_text;
use vellum_io::lane;

use super::event_limits::{EventLimits, Posted};
use super::events::Events;

/// In events offsets are told in these.
const SECTOR_BYTES: u64 = 512;
/// So many events wait at most.
const MOST_EVENTS: usize = 1024;

#[derive(Debug, Default)]
struct Waiting {
    events: VecDeque<Posted>,
    limits: EventLimits,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    posted: Event,
}

/// Where events are posted from any thread; clones post to the same place.
#[derive(Debug, Clone, Default)]
pub(super) struct Notices(Arc<Queue>);

impl Notices {
    fn post(&self, name: &'static str, data: Value) {
        let time = SystemTime::now();
        let mut waiting = self.0.waiting.lock();
        let event = Posted { name, data, time };
        let Some(event) = waiting.limits.admit(event, lane::now()) else {
            return;
        };
        if waiting.events.len() < MOST_EVENTS {
            waiting.events.push_back(event);
            drop(waiting);
            self.0.posted.notify(usize::MAX);
        }
    }

    /// Emits what is posted; never ends.
    pub(super) async fn forward(self, events: Events) {
        loop {
            let posted = self.0.posted.listen();
            let (ready, next) = self.take_ready();
            for Posted { name, data, time } in ready {
                events.emit_of(name, data, time);
            }
            match next {
                Some(next) => drop(select(posted, lane::sleep_until(next)).await),
                None => posted.await,
            }
        }
    }

    /// What is to be told now, and when to look again although nothing is posted.
    fn take_ready(&self) -> (Vec<Posted>, Option<Instant>) {
        let mut waiting = self.0.waiting.lock();
        let mut ready: Vec<Posted> = waiting.events.drain(..).collect();
        ready.extend(waiting.limits.due(lane::now()));
        (ready, waiting.limits.next())
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

    /// Posts that a node went without all that was written to it.
    pub(super) fn of_loss(&self, node: &str, error: &Error) {
        let errno = error.errno();
        let failed = FailedRequest {
            operation: Operation::Flush,
            errno,
            reason: &errno_text(errno),
        };
        self.post("BLOCK_IO_ERROR", io_error("", node, &failed));
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
        move |failed| {
            notices.post("BLOCK_IO_ERROR", io_error(&id, &node, failed));
        }
    }

    /// What hears of it when requests of the export `id`, which was made for `node`, wait for room.
    pub(super) fn of_room(
        &self,
        id: &str,
        node: &str,
    ) -> impl Fn(&RoomNotice<'_>) + Send + Sync + 'static {
        let (notices, id, node) = (self.clone(), id.to_owned(), node.to_owned());
        move |notice| match notice {
            RoomNotice::Full(request) => {
                let mut data = io_error(&id, &node, request);
                data["action"] = json!("stop");
                data["nospace"] = json!(true);
                notices.post("BLOCK_IO_ERROR", data);
            }
            RoomNotice::Again { waited } => {
                let waited_ms = waited.as_secs_f64() * 1e3;
                let data = json!({"device": id, "node-name": node, "waited-ms": waited_ms});
                notices.post("X_VELLUM_IO_RESUMED", data);
            }
        }
    }
}

fn io_error(device: &str, node: &str, failed: &FailedRequest<'_>) -> Value {
    let operation = match failed.operation {
        Operation::Read => "read",
        Operation::Write | Operation::Flush | Operation::Discard => "write",
    };
    json!({
        "device": device,
        "qom-path": "",
        "node-name": node,
        "operation": operation,
        "action": "report",
        "nospace": failed.errno == libc::ENOSPC,
        "reason": failed.reason,
    })
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::pin::pin;
    use std::rc::Rc;
    use std::time::Duration;

    use crate::events::Listener;

    use super::*;

    fn posted(notices: &Notices) -> Vec<Posted> {
        notices.take_ready().0
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
        let [Posted { name, data, .. }] = &events[..] else {
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

    #[test]
    fn a_guest_that_reads_on_where_children_differ_floods_nobody() {
        let notices = Notices::default();
        for _ in 0..1000 {
            for child in ["a", "b"] {
                let report = QuorumReport::Bad {
                    child: child.to_owned(),
                    operation: QuorumOperation::Read,
                    range: 0..512,
                    error: None,
                };
                let node = "q".to_owned();
                notices.of_node(NodeNotice::Quorum { node, report });
            }
        }
        let events = posted(&notices);
        let nodes: Vec<_> = events
            .iter()
            .map(|event| &event.data["node-name"])
            .collect();
        assert_eq!(nodes, ["a", "b"]);
    }

    struct Heard(RefCell<Vec<Value>>);

    impl Listener for Heard {
        fn hear(&self, event: &Value) {
            self.0.borrow_mut().push(event["data"]["reference"].clone());
        }
    }

    #[test]
    fn the_last_event_of_a_second_is_told_when_it_is_over() {
        let heard = Rc::new(Heard(RefCell::default()));
        let (notices, events) = (Notices::default(), Events::default());
        events.join(heard.clone());
        let fail = |node: &str, times: usize| {
            for _ in 0..times {
                let report = QuorumReport::Failure { range: 0..512 };
                let node = node.to_owned();
                notices.of_node(NodeNotice::Quorum { node, report });
            }
        };
        lane::block_on(async {
            let forward = pin!(notices.clone().forward(events));
            let script = pin!(async {
                fail("q", 1);
                lane::sleep(Duration::from_millis(50)).await;
                assert_eq!(*heard.0.borrow(), ["q"]);
                fail("q", 100);
                lane::sleep(Duration::from_millis(1500)).await;
            });
            select(forward, script).await;
        });
        assert_eq!(*heard.0.borrow(), ["q", "q"]);
    }
}

//! Events that guests can cause as often as they like: of one kind, from one place, one is told in
//! a second. [`super::notices`] asks.
//!
//! Invariants:
//! - The first is told at once; of those that follow within the second the last is told when it
//!   is over, with the time at which it happened.
//! - What is kept is bounded by the places that had events within the last second.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;

/// As in QEMU.
const INTERVAL: Duration = Duration::from_secs(1);

/// An event that was not told yet.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) name: &'static str,
    pub(super) data: Value,
    pub(super) time: SystemTime,
}

impl Posted {
    /// What tells its place from others, if such events are limited.
    fn place(&self) -> Option<String> {
        let members: &[&str] = match self.name {
            // A node that nobody exports any more has no device.
            "BLOCK_IO_ERROR" | "X_VELLUM_IO_RESUMED" => &["device", "node-name"],
            "QUORUM_FAILURE" => &["reference"],
            "QUORUM_REPORT_BAD" => &["node-name"],
            _ => return None,
        };
        Some(
            members
                .iter()
                .map(|member| self.data[member].to_string())
                .collect(),
        )
    }
}

#[derive(Debug)]
struct Place {
    /// Until then nothing more is told.
    until: Instant,
    waits: Option<Posted>,
}

/// What was told within the last second.
#[derive(Debug, Default)]
pub(super) struct EventLimits(HashMap<(&'static str, String), Place>);

impl EventLimits {
    /// Gives back an event that may be told at once; keeps another until it is [due](Self::due).
    pub(super) fn admit(&mut self, event: Posted, now: Instant) -> Option<Posted> {
        let Some(place) = event.place() else {
            return Some(event);
        };
        let key = (event.name, place);
        if let Some(place) = self.0.get_mut(&key)
            && (now < place.until || place.waits.is_some())
        {
            place.waits = Some(event);
            return None;
        }
        let until = now + INTERVAL;
        self.0.insert(key, Place { until, waits: None });
        Some(event)
    }

    /// When there is something to do.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.values().map(|place| place.until).min()
    }

    /// The events whose second is over.
    pub(super) fn due(&mut self, now: Instant) -> Vec<Posted> {
        let mut due = Vec::new();
        self.0.retain(|_, place| {
            if now < place.until {
                return true;
            }
            place.until = now + INTERVAL;
            let waited = place.waits.take();
            let is_busy = waited.is_some();
            due.extend(waited);
            is_busy
        });
        due.sort_by_key(|event| event.time);
        due
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(node: &str, number: u64) -> Posted {
        Posted {
            name: "QUORUM_REPORT_BAD",
            data: json!({"node-name": node, "sector-num": number}),
            time: SystemTime::UNIX_EPOCH + Duration::from_millis(number),
        }
    }

    fn numbers(events: &[Posted]) -> Vec<u64> {
        let number = |event: &Posted| event.data["sector-num"].as_u64().expect("a number");
        events.iter().map(number).collect()
    }

    #[test]
    fn of_many_the_first_and_the_last_are_told() {
        let begin = Instant::now();
        let at = |millis| begin + Duration::from_millis(millis);
        let mut limits = EventLimits::default();
        assert!(limits.admit(report("a", 0), at(0)).is_some());
        for millis in 1..900 {
            assert!(limits.admit(report("a", millis), at(millis)).is_none());
        }
        // Another place has a second of its own.
        assert!(limits.admit(report("b", 900), at(900)).is_some());
        assert_eq!(limits.next(), Some(at(1000)));
        assert!(limits.due(at(999)).is_empty());
        assert_eq!(numbers(&limits.due(at(1000))), [899]);
        // What was told late begins a second, too.
        assert!(limits.admit(report("a", 1999), at(1999)).is_none());
        assert_eq!(numbers(&limits.due(at(2000))), [1999]);
        assert!(limits.due(at(3000)).is_empty());
        assert_eq!(limits.next(), None);
        assert!(limits.admit(report("a", 3001), at(3001)).is_some());
    }

    #[test]
    fn what_waits_keeps_its_turn_when_nobody_came_in_time() {
        let begin = Instant::now();
        let late = begin + 5 * INTERVAL;
        let mut limits = EventLimits::default();
        assert!(limits.admit(report("a", 0), begin).is_some());
        assert!(limits.admit(report("a", 1), begin).is_none());
        assert!(limits.admit(report("a", 2), late).is_none());
        assert_eq!(numbers(&limits.due(late)), [2]);
    }

    #[test]
    fn other_events_are_not_limited() {
        let mut limits = EventLimits::default();
        for _ in 0..3 {
            let event = Posted {
                name: "BLOCK_WRITE_THRESHOLD",
                data: json!({"node-name": "a"}),
                time: SystemTime::now(),
            };
            assert!(limits.admit(event, Instant::now()).is_some());
        }
        assert_eq!(limits.next(), None);
    }
}

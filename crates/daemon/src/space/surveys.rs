//! [`LastSurveys`]: what was found when it was last asked where the space of disks goes, for those who only
//! look. A survey reads tables, so none is begun for them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

/// What was found of a disk. Numbers are missing where the survey has not come to its end, or the image has
/// no such thing.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SpaceSurvey {
    /// When it ended, in seconds since 1970.
    pub(crate) ended_seconds: f64,
    /// Data that images below supply.
    pub(crate) base_bytes: Option<u64>,
    /// What only internal snapshots hold.
    pub(crate) snapshot_bytes: Option<u64>,
    /// What is counted and nothing leads to.
    pub(crate) leaked_bytes: Option<u64>,
}

impl SpaceSurvey {
    /// What the answer of `x-vellum-query-space` says, now.
    pub(super) fn of(told: &Value) -> SpaceSurvey {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let number = |key: &str| told[key].as_u64();
        SpaceSurvey {
            ended_seconds: since.map_or(0.0, |since| since.as_secs_f64()),
            base_bytes: number("base-bytes").filter(|_| told["complete"] == true),
            snapshot_bytes: number("snapshot-bytes"),
            leaked_bytes: number("leaked-bytes"),
        }
    }
}

/// See the module's head. By the names of nodes; some may be gone.
#[derive(Debug, Default)]
pub(crate) struct LastSurveys(RefCell<BTreeMap<String, SpaceSurvey>>);

impl LastSurveys {
    /// Notes one, and forgets those of nodes that are not there any more.
    pub(super) fn note(&self, name: &str, found: SpaceSurvey, is_there: impl Fn(&str) -> bool) {
        let mut all = self.0.borrow_mut();
        all.insert(name.to_owned(), found);
        all.retain(|name, _| is_there(name));
    }

    /// All of them.
    pub(crate) fn all(&self) -> BTreeMap<String, SpaceSurvey> {
        self.0.borrow().clone()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_last_survey_of_each_node_that_is_there_is_kept() {
        let surveys = LastSurveys::default();
        let told = |leaked: u64, complete: bool| {
            let told = json!({"base-bytes": 7, "complete": complete, "leaked-bytes": leaked});
            SpaceSurvey::of(&told)
        };
        surveys.note("a", told(1, true), |_| true);
        surveys.note("b", told(2, true), |_| true);
        surveys.note("b", told(3, false), |name| name != "a");
        let all = surveys.all();
        assert_eq!(all.keys().collect::<Vec<_>>(), ["b"]);
        let found = &all["b"];
        assert_eq!((found.leaked_bytes, found.base_bytes), (Some(3), None));
        assert_eq!(found.snapshot_bytes, None);
        assert!(found.ended_seconds > 1e9);
    }
}

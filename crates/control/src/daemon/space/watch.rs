//! [`SpaceWatch`]: warnings before a file system with images on it is full.
//!
//! Invariants:
//! - Each threshold is told of once when it is reached, and again only after the file system was
//!   below it by [`HYSTERESIS`].
//! - A file system that does not answer holds up no command: it is asked on a worker thread.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use parking_lot::Mutex;
use serde_json::json;
use tracing::trace;
use vellum_io::lane::{self, Descriptor};
use vellum_io::spawn;

use crate::daemon::Daemon;

/// How often file systems are looked at.
const INTERVAL: Duration = Duration::from_secs(3);
/// So many percent below a threshold it counts as not reached.
const HYSTERESIS: f64 = 2.0;

/// How full a file system is.
#[derive(Debug, Clone, PartialEq)]
struct Fill {
    folder: String,
    used_percent: f64,
    size_bytes: u64,
    available_bytes: u64,
}

/// A file system that has reached a threshold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::daemon) struct Warning {
    pub(in crate::daemon) folder: String,
    /// The highest one that it has reached; 0: none.
    pub(in crate::daemon) threshold_percent: u32,
}

/// What is watched, and what was told of it.
#[derive(Debug, Default)]
pub(in crate::daemon) struct SpaceWatch {
    /// Ascending.
    thresholds_percent: RefCell<Vec<u32>>,
    /// By folders.
    reached: RefCell<BTreeMap<String, u32>>,
    runs: Cell<bool>,
}

impl SpaceWatch {
    /// How it stands with the file systems that are watched.
    pub(in crate::daemon) fn warnings(&self) -> Vec<Warning> {
        let reached = self.reached.borrow();
        let warning = |(folder, percent): (&String, &u32)| Warning {
            folder: folder.clone(),
            threshold_percent: *percent,
        };
        reached.iter().map(warning).collect()
    }

    /// Takes in how full file systems are; those for which another threshold counts now.
    fn take_in(&self, fills: &[Fill]) -> Vec<(Fill, u32)> {
        let thresholds = self.thresholds_percent.borrow();
        let mut reached = self.reached.borrow_mut();
        reached.retain(|folder, _| fills.iter().any(|fill| fill.folder == *folder));
        let mut changed = Vec::new();
        for fill in fills {
            let was = reached.get(&fill.folder).copied().unwrap_or(0);
            let now = threshold(&thresholds, was, fill.used_percent);
            reached.insert(fill.folder.clone(), now);
            if now != was {
                changed.push((fill.clone(), now));
            }
        }
        changed
    }
}

/// The highest threshold that counts as reached, where `was` has counted before; 0: none.
fn threshold(thresholds_percent: &[u32], was: u32, used_percent: f64) -> u32 {
    let counts = |percent: &&u32| {
        let bound = f64::from(**percent);
        used_percent >= bound || **percent <= was && used_percent > bound - HYSTERESIS
    };
    let counting = thresholds_percent.iter().filter(counts);
    counting.max().copied().unwrap_or(0)
}

impl Daemon {
    /// Warns from now on when file systems with images on them are as full as one of these says. None:
    /// of nothing. Must run inside a lane.
    pub fn watch_space(self: &Rc<Self>, thresholds_percent: &[u32]) {
        let mut sorted = thresholds_percent.to_vec();
        sorted.sort_unstable();
        let is_wanted = !sorted.is_empty();
        self.space.thresholds_percent.replace(sorted);
        if !is_wanted {
            self.space.reached.borrow_mut().clear();
        }
        if is_wanted && !self.space.runs.replace(true) {
            drop(spawn(self.clone().look_at_space()));
        }
    }

    async fn look_at_space(self: Rc<Self>) {
        loop {
            let is_wanted = !self.space.thresholds_percent.borrow().is_empty();
            if is_wanted {
                let ended = self.ended.clone();
                let look = pin!(fills(self.nodes.file_paths()));
                let Either::Left((fills, _)) = select(look, pin!(ended.wait())).await else {
                    return;
                };
                for (fill, percent) in self.space.take_in(&fills) {
                    self.tell_of_space(&fill, percent);
                }
            }
            let pause = pin!(lane::sleep(INTERVAL));
            if let Either::Right(_) = select(pause, pin!(self.ended.wait())).await {
                return;
            }
        }
    }

    fn tell_of_space(&self, fill: &Fill, threshold_percent: u32) {
        trace!(
            name: "space_warning",
            folder = fill.folder,
            used_percent = fill.used_percent,
            threshold_percent,
            available_bytes = fill.available_bytes
        );
        let mut data = json!({
            "folder": fill.folder,
            "used-percent": fill.used_percent,
            "size-bytes": fill.size_bytes,
            "available-bytes": fill.available_bytes,
        });
        if threshold_percent > 0 {
            data["threshold-percent"] = json!(threshold_percent);
        }
        self.events.emit("X_VELLUM_SPACE_WARNING", data);
    }
}

/// How full the file systems are that files lie on.
async fn fills(paths: Vec<String>) -> Vec<Fill> {
    let found = Arc::new(Mutex::new(Vec::new()));
    let put = found.clone();
    let work = move || {
        *put.lock() = find(&paths);
        Ok(0)
    };
    let none = Arc::new(Descriptor::none("file systems".to_owned()));
    // Without workers there is nothing to tell.
    let _ = lane::call(&none, "look at space", work, lane::finish_unit).await;
    std::mem::take(&mut *found.lock())
}

fn find(paths: &[String]) -> Vec<Fill> {
    use std::os::unix::fs::MetadataExt;
    let folders = paths.iter().filter_map(|path| Path::new(path).parent());
    let folders: BTreeSet<PathBuf> = folders
        .map(|folder| match folder.as_os_str().is_empty() {
            true => PathBuf::from("."),
            false => folder.to_owned(),
        })
        .collect();
    let mut known = BTreeSet::new();
    let fill = |folder: PathBuf| {
        let device = std::fs::metadata(&folder).ok()?.dev();
        if !known.insert(device) {
            return None;
        }
        let counts = rustix::fs::statvfs(&folder).ok()?;
        let used = counts.f_blocks.saturating_sub(counts.f_bfree);
        let usable = used.saturating_add(counts.f_bavail);
        Some(Fill {
            folder: folder.to_string_lossy().into_owned(),
            // As df has it: what only root may take is not there.
            used_percent: used as f64 * 100.0 / usable.max(1) as f64,
            size_bytes: counts.f_blocks.saturating_mul(counts.f_frsize),
            available_bytes: counts.f_bavail.saturating_mul(counts.f_frsize),
        })
    };
    folders.into_iter().filter_map(fill).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_told_once_and_again_only_after_a_drop() {
        let watch = SpaceWatch::default();
        watch.thresholds_percent.replace(vec![85, 95]);
        let told = |used_percent: f64| {
            let fill = Fill {
                folder: "/a".to_owned(),
                used_percent,
                size_bytes: 100,
                available_bytes: 1,
            };
            let changed = watch.take_in(&[fill]);
            changed.first().map(|(_, percent)| *percent)
        };
        assert_eq!(told(84.9), None);
        assert_eq!(told(85.0), Some(85));
        assert_eq!(told(84.0), None);
        assert_eq!(told(86.0), None);
        assert_eq!(told(99.0), Some(95));
        assert_eq!(told(93.5), None);
        assert_eq!(told(92.9), Some(85));
        assert_eq!(told(82.9), Some(0));
        assert_eq!(told(84.9), None);
        assert_eq!(told(96.0), Some(95));
        assert_eq!(watch.warnings()[0].threshold_percent, 95);
        assert!(watch.take_in(&[]).is_empty() && watch.warnings().is_empty());
    }
}

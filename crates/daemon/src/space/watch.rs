//! How file systems with images on them are watched.
//!
//! Invariant: a file system that does not answer holds up no command: it is asked on a worker thread.

use std::collections::BTreeSet;
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

use super::fill::Fill;

/// How often file systems are looked at.
const INTERVAL: Duration = Duration::from_secs(3);
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

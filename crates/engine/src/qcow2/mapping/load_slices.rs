//! Brings L2 slices into memory on a miss: the one that is needed, and those behind it where a
//! scan is going on ([`readahead`](crate::qcow2::table_cache::readahead)).

use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::Slice;
use futures_util::future::join_all;
use smallvec::SmallVec;
use vellum_format::types::GuestOffset;
use vellum_io::Result;

/// Slices that lie side by side on disk.
struct SliceRun {
    key: u64,
    slices: usize,
}

impl Image {
    /// Brings the L2 slice of `guest` into memory, and those behind it if a scan
    /// is going on.
    pub(crate) async fn load_slice_at(&self, guest: GuestOffset, slice: Slice) -> Result<()> {
        let slice_bytes = self.mapper().slice_guest_bytes();
        let most = self.l2.scan_tables() as u64;
        let window = self.readahead.window(guest.bytes() / slice_bytes, most);
        if window <= 1 {
            return self.load_slice(slice).await;
        }
        let runs = self.runs_behind(guest, slice, window);
        let loads = runs.iter().map(|run| {
            self.l2.load_run(run.key, run.slices, true, |slices| {
                let len_bytes = slices * self.l2.table_bytes();
                self.read_slices(run.key, len_bytes as u64)
            })
        });
        // Only the first is needed now; who needs another will see its error.
        join_all(loads).await.swap_remove(0)
    }

    /// `first`, and the slices that map what follows `guest`, `count` in all.
    fn runs_behind(&self, guest: GuestOffset, first: Slice, count: u64) -> SmallVec<[SliceRun; 2]> {
        let slice_bytes = self.mapper().slice_guest_bytes();
        let table_bytes = self.l2.table_bytes() as u64;
        let mut runs: SmallVec<[SliceRun; 2]> = SmallVec::new();
        runs.push(SliceRun {
            key: first.key,
            slices: 1,
        });
        for ahead in 1..count {
            let at = guest.bytes() / slice_bytes * slice_bytes + ahead * slice_bytes;
            if at >= self.size_bytes() {
                break;
            }
            // A table that does not exist needs no load, and the miss of one that
            // cannot be decoded is for those to report who need it.
            let Ok(Some(place)) = self.mapper().place(GuestOffset(at)) else {
                continue;
            };
            match runs.last_mut() {
                Some(run) if run.key + run.slices as u64 * table_bytes == place.slice.key => {
                    run.slices += 1;
                }
                _ => runs.push(SliceRun {
                    key: place.slice.key,
                    slices: 1,
                }),
            }
        }
        runs
    }
}

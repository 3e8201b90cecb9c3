//! What reads look at is not given back before they have ended, and all of it is in the end; no
//! copy of the mapping reaches the disk before the data that it leads to.

use std::sync::Arc;

use super::*;
use crate::qcow2::commit::epochs::Epochs;
use vellum_io::sync::atomic::Ordering::SeqCst;
use vellum_io::sync::{block_on, explore, join, point, thread};

const CLUSTERS: usize = 4;

#[derive(Default)]
struct Clusters {
    commits: Commits,
    epochs: Arc<Epochs>,
    mapping: Mutex<usize>,
    given_back: [AtomicBool; CLUSTERS],
}

impl Clusters {
    fn read(&self) {
        let reading = self.epochs.enter();
        let cluster = *self.mapping.lock();
        point();
        assert!(!self.given_back[cluster].load(SeqCst), "it is being read");
        drop(reading);
    }

    fn replace(&self, with: usize) {
        let old = std::mem::replace(&mut *self.mapping.lock(), with);
        self.commits.defer_free(DroppedRun {
            start: HostCluster(old as u64),
            count: 1,
            reason: DropReason::Replaced,
            freeable: 0,
        });
    }

    fn give_back(&self) {
        for _ in 0..2 {
            let Some(ready) = self.commits.take_quiescent(&self.epochs) else {
                return;
            };
            for run in merged(ready) {
                for cluster in run.start.index()..run.start.index() + run.count {
                    let before = self.given_back[cluster as usize].swap(true, SeqCst);
                    assert!(!before, "given back twice");
                }
            }
        }
    }

    /// A commit, all of whose writes and barriers have gone well.
    fn commit(&self) {
        let dropped = std::mem::take(&mut self.commits.lists().not_durable);
        point();
        self.commits.lists().durable.extend(dropped);
        self.give_back();
    }
}

#[test]
fn dropped_clusters_wait_for_their_readers_and_all_are_given_back() {
    explore(|| {
        let clusters = Arc::new(Clusters::default());
        let reading = [2, 2].map(|times| {
            let clusters = clusters.clone();
            thread::spawn(move || (0..times).for_each(|_| clusters.read()))
        });
        let writer = clusters.clone();
        let writer = thread::spawn(move || {
            for cluster in 1..CLUSTERS {
                writer.replace(cluster);
            }
        });
        let committer = clusters.clone();
        let committer = thread::spawn(move || {
            for _ in 0..3 {
                committer.commit();
            }
        });
        join(reading.into_iter().chain([writer, committer]));
        clusters.commit();
        while clusters.commits.lists().has_durable() {
            block_on(clusters.epochs.wait_for_previous());
            clusters.give_back();
        }
        let given_back = clusters
            .given_back
            .each_ref()
            .map(|given| given.load(SeqCst));
        assert_eq!(given_back, [true, true, true, false]);
    });
}

/// As beside a compaction, which waits for reads outside of the commits.
#[test]
fn who_waits_beside_commits_has_nothing_given_back_too_early() {
    explore(|| {
        let clusters = Arc::new(Clusters::default());
        let reading = {
            let clusters = clusters.clone();
            thread::spawn(move || (0..2).for_each(|_| clusters.read()))
        };
        let waiting = {
            let clusters = clusters.clone();
            thread::spawn(move || block_on(clusters.epochs.wait_for_all()))
        };
        clusters.replace(1);
        clusters.commit();
        clusters.replace(2);
        clusters.commit();
        join([reading, waiting]);
    });
}

/// Data, entries that lead to it, and what of both is on disk.
#[derive(Default)]
struct Disk {
    commits: Commits,
    written: [AtomicBool; 3],
    entries: Mutex<Vec<usize>>,
    durable: Mutex<[bool; 3]>,
}

impl Disk {
    fn write(&self, data: usize) {
        self.written[data].store(true, SeqCst);
        let _change = self.commits.begin_change(WriteOrder::AfterBarrier);
        self.entries.lock().push(data);
        point();
    }

    fn commit(&self) {
        let copies = self.entries.lock().clone();
        let mut durable = self.durable.lock();
        if self.commits.needs_barrier() {
            *durable = self.written.each_ref().map(|written| written.load(SeqCst));
        }
        for data in copies {
            assert!(durable[data], "an entry without its data");
        }
    }
}

#[test]
fn no_entry_reaches_the_disk_before_its_data() {
    explore(|| {
        let disk = Arc::new(Disk::default());
        let writers = [0, 1, 2].map(|data| {
            let disk = disk.clone();
            thread::spawn(move || disk.write(data))
        });
        let committer = disk.clone();
        let committer = thread::spawn(move || {
            for _ in 0..3 {
                committer.commit();
            }
        });
        join(writers.into_iter().chain([committer]));
        disk.commit();
    });
}

//! One suite over every storage: what [`Storage`] promises, on memory, on files
//! (buffered and direct, io_uring and threads) and through the wrappers.

mod cases;
mod random;

use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use vellum_io::lane::{self, Backend, LaneOptions};
use vellum_storage::wrap::{DelayStorage, FaultStorage, Matching, Operation, TraceStorage};
use vellum_storage::{FileOptions, FileStorage, MemStorage, Storage, file::Create};

/// Makes an empty storage; the folder is there for its files.
type Make = fn(&TempDir) -> Arc<dyn Storage>;

fn file(folder: &TempDir, direct: bool) -> Arc<dyn Storage> {
    let options = FileOptions::default()
        .create(Create::Truncate)
        .direct(direct);
    FileStorage::open(folder.path().join("file"), &options).unwrap()
}

const MAKERS: [(&str, Make); 6] = [
    ("memory", |_| Arc::new(MemStorage::new())),
    ("buffered file", |folder| file(folder, false)),
    ("direct file", |folder| file(folder, true)),
    ("faults", |folder| FaultStorage::new(file(folder, false))),
    ("delays", |folder| {
        let storage = DelayStorage::new(file(folder, true));
        storage.delay(
            Matching::operation(Operation::Write),
            Duration::from_micros(50),
        );
        storage
    }),
    ("trace", |folder| TraceStorage::new(file(folder, true))),
];

/// Runs one case over everything, each in a thread with a lane of its own.
fn everywhere(case: fn(Arc<dyn Storage>)) {
    for backend in [Backend::IoUring, Backend::Threads] {
        for (name, make) in MAKERS {
            let work = move || {
                lane::install(&LaneOptions {
                    backend,
                    ..LaneOptions::default()
                })
                .unwrap();
                let folder = folder();
                case(make(&folder));
            };
            if std::thread::spawn(work).join().is_err() {
                panic!("failed on {name} over {backend:?}");
            }
        }
    }
}

/// A folder on a real disk: the temporary one may be a file system in memory.
fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

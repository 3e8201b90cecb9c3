//! What a write log takes in memory, as the allocator sees it, when it is opened after a crash:
//! not as much as the log is long.

#[path = "../../io/tests/common/heap.rs"]
mod heap;
#[path = "common/log_gate.rs"]
mod log_gate;

use std::path::Path;
use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{OpenOptions, Qcow2, WriteLogOptions};
use vellum::{BlockDevice, Buffer, RequestFlags, Storage};
use vellum_io::lane::block_on;
use vellum_storage::file::{Create, FileOptions, FileStorage};

use heap::peak_of;
use log_gate::LogGate;

const LOG_BYTES: u64 = 128 << 20;
const WRITE_BYTES: u64 = 32 << 10;
const WRITES: u64 = 800;
const LIMIT_BYTES: u64 = 48 << 20;

fn file(path: &Path) -> Arc<dyn Storage> {
    let options = FileOptions::default().create(Create::IfMissing);
    FileStorage::open(path, &options).expect("opened")
}

/// An image and its log as a kill leaves them, with records of every second piece of the disk's start.
async fn killed(folder: &Path) {
    let (image, log) = (file(&folder.join("image")), file(&folder.join("log")));
    let size_bytes = 4 * WRITES * WRITE_BYTES;
    let options = CreateOptions::default().size_bytes(size_bytes);
    create(image.clone(), None, &options).await.expect("made");
    let log = WriteLogOptions::new(log, "log").len_bytes(LOG_BYTES);
    let options = OpenOptions::default().write_log(Some(log));
    let opened = Qcow2::open(image, Arc::new(DenyAll), options).await;
    let opened = opened.expect("opened");
    for index in 0..WRITES {
        let bytes = Buffer::copy_of(&vec![index as u8; WRITE_BYTES as usize]);
        let written = opened.write(2 * index * WRITE_BYTES, bytes, RequestFlags::default());
        written.await.expect("written");
        if index % 16 == 15 {
            opened.flush().await.expect("flushed");
        }
    }
    for name in ["image", "log"] {
        let copy = folder.join(format!("killed-{name}"));
        std::fs::copy(folder.join(name), copy).expect("copied");
    }
    opened.close().await.expect("closed");
}

async fn open(folder: &Path, read_only: bool) -> Arc<Qcow2> {
    let gate = LogGate {
        name: "log",
        log: file(&folder.join("killed-log")),
    };
    let options = OpenOptions::default().read_only(read_only);
    let image = file(&folder.join("killed-image"));
    let opened = Qcow2::open(image, Arc::new(gate), options).await;
    opened.expect("opened")
}

#[test]
fn a_log_is_not_held_in_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    block_on(killed(folder));
    for read_only in [true, false] {
        let (image, peak_bytes) = peak_of(|| block_on(open(folder, read_only)));
        println!("read-only {read_only}: {peak_bytes} bytes");
        // Over an image that is only read lies what the log holds.
        let shown_bytes = match read_only {
            true => WRITES * WRITE_BYTES,
            false => 0,
        };
        assert!(peak_bytes < LIMIT_BYTES + shown_bytes);
        block_on(async {
            for index in 0..WRITES {
                let buffer = Buffer::for_read(WRITE_BYTES as usize);
                let read = image.read(2 * index * WRITE_BYTES, buffer).await;
                let read = read.expect("read");
                assert!(read.iter().all(|byte| *byte == index as u8), "{index}");
            }
            image.close().await.expect("closed");
        });
    }
}

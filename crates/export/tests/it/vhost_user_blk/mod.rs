//! The vhost-user-blk export with guests whose client others wrote.

mod guest;
mod hostile;
mod in_flight;
mod migration;
mod requests;
mod resets;
mod seen;
mod server;

use std::sync::Arc;

use vellum::raw::RawOptions;
use vellum::{BlockDevice, Raw};
use vellum_export::vhost_user_blk::Options;
use vellum_storage::MemStorage;

use seen::Seen;
use server::Server;

/// Bytes of a disk in these tests.
const DISK_BYTES: usize = 4 << 20;

/// A disk in memory, and the memory.
fn disk() -> (Arc<dyn BlockDevice>, Arc<MemStorage>) {
    let storage = Arc::new(MemStorage::with_bytes(vec![0x5a; DISK_BYTES]));
    let raw = Raw::open(storage.clone(), RawOptions::default()).expect("a device");
    (raw, storage)
}

fn writable() -> Options {
    Options {
        read_only: false,
        queues: 4,
        serial: "disk-17".to_owned(),
        ..Options::default()
    }
}

/// A server of a disk in memory, and the memory.
fn serve(options: Options) -> (Server, Arc<MemStorage>) {
    let (device, storage) = disk();
    (Server::start(device, options), storage)
}

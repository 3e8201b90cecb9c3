//! Which disk devices are that stand on each other.

use std::sync::Arc;

use vellum::nodes::{DeviceStorage, Link};
use vellum::{BlockDevice, Raw, RawOptions, Storage};
use vellum_storage::MemStorage;
use vellum_storage::nodes::debug::{DebugStorage, Debugger, Limits};

#[test]
fn what_stands_on_a_device_is_the_same_disk() {
    let memory: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(vec![0; 4096]));
    let raw = |storage| Raw::open(storage, RawOptions::default()).expect("a device");
    let below = raw(memory.clone());
    let on_device = DeviceStorage::new(Link::new(below.clone()));
    let debugger = Debugger::new(Vec::new(), |_| ());
    let filter = DebugStorage::new(on_device.clone(), debugger, Limits::default());
    let window = RawOptions::default().offset_bytes(512);
    let window = Raw::open(on_device, window).expect("a device");
    let other = raw(Arc::new(MemStorage::with_bytes(vec![0; 4096])));
    assert!(below.identity().is_some());
    for same in [window, raw(Arc::new(filter)), raw(memory)] {
        assert_eq!(same.identity(), below.identity());
    }
    assert_ne!(other.identity(), below.identity());
}

//! Filters beside jobs: limits, copy-on-read, or a `raw` node with or without an offset, over a disk, by which
//! a client reads the disk while a job changes its chain. A filter shows the same content before and after.
//! And filters that the disk's own clients are served through ([`ServedFilter`]), under which its chain changes.
//!
//! All of it is drawn apart: a scenario without filters is the same as ever.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};
use vellum::BlockDevice;
use vellum_io::{Buffer, JoinHandle};

use super::guest_disk::{GuestDisk, ServedFilter};
use super::setup::Setup;
use crate::failure::{Failure, FailureKind};
use crate::sparse_bytes::SECTOR_BYTES;

/// Groups of limits are the process's, which plays many scenarios.
static GROUPS: AtomicU64 = AtomicU64::new(0);

/// A filter over a disk, and who reads by it.
pub(super) struct Filter {
    name: String,
    group: Option<String>,
    over: Rc<Cell<bool>>,
    reader: JoinHandle<()>,
}

impl Filter {
    /// Puts one over the node that shows a disk, now and then.
    pub(super) async fn begin(
        setup: &Rc<Setup>,
        disk: &Rc<GuestDisk>,
        top: &str,
    ) -> Option<Filter> {
        if !setup.draw_apart(|rng| rng.chance(1, 2)) {
            return None;
        }
        let name = format!("{}filter", disk.name);
        let mut node = json!({"driver": "copy-on-read", "node-name": name, "file": top});
        let mut group = None;
        if setup.draw_apart(|rng| rng.chance(1, 2)) {
            let id = format!("g{}", GROUPS.fetch_add(1, Ordering::Relaxed));
            let iops = setup.draw_apart(|rng| *rng.pick(&[50, 400, 5000]));
            let limits = json!({"iops-total": iops});
            let object = json!({"qom-type": "throttle-group", "id": id, "limits": limits});
            if !setup.demand("object-add", object).await {
                return None;
            }
            node["driver"] = json!("throttle");
            node["throttle-group"] = json!(id);
            group = Some(id);
        }
        let mut window_offset = 0;
        if group.is_none() && setup.draw_later(|rng| rng.chance(1, 2)) {
            node["driver"] = json!("raw");
            let sectors = disk.model.borrow().least_size_bytes() / SECTOR_BYTES;
            if setup.draw_later(|rng| rng.chance(1, 2)) {
                let first = setup.draw_later(|rng| rng.below(sectors / 2));
                let count = setup.draw_later(|rng| rng.between(1, sectors - first));
                window_offset = first * SECTOR_BYTES;
                node["offset"] = json!(window_offset);
                node["size"] = json!(count * SECTOR_BYTES);
            }
        }
        if !setup.demand("blockdev-add", node).await {
            return None;
        }
        let over = Rc::new(Cell::new(false));
        let shown = Shown {
            device: setup.nodes.device(&name).ok()?,
            offset: window_offset,
        };
        let read = read_by(setup.clone(), disk.clone(), shown, over.clone());
        Some(Filter {
            name,
            group,
            over,
            reader: setup.lanes.own().spawn(read),
        })
    }

    /// Takes it away.
    pub(super) async fn end(self, setup: &Setup) {
        self.over.set(true);
        self.reader.await;
        let removed = setup.demand("blockdev-del", json!({"node-name": self.name}));
        if removed.await
            && let Some(group) = self.group
        {
            setup.demand("object-del", json!({"id": group})).await;
        }
    }
}

impl ServedFilter {
    /// Puts one over an image, now and then.
    pub(super) async fn begin(setup: &Setup, disk: &GuestDisk, top: &str) -> Option<ServedFilter> {
        if !setup.draw_served(|rng| rng.chance(1, 3)) {
            return None;
        }
        let name = disk.new_name("w");
        let mut target = None;
        let kind = setup.draw_served(|rng| rng.below(5));
        let mut node = match kind {
            0 => json!({"driver": "raw", "file": top}),
            1 => json!({"driver": "copy-on-read", "file": top}),
            2 | 3 => json!({"driver": "quorum", "vote-threshold": 1, "children": [top]}),
            _ => {
                let kept = disk.new_name("k");
                if !setup
                    .demand("blockdev-add", Self::target(disk, &kept))
                    .await
                {
                    return None;
                }
                let node = json!({"driver": "copy-before-write", "file": top, "target": kept});
                target = Some(kept);
                node
            }
        };
        node["node-name"] = json!(name);
        let filter = ServedFilter {
            name,
            target,
            keeps_its_child: kind > 1,
        };
        if setup.demand("blockdev-add", node).await {
            return Some(filter);
        }
        filter.remove_target(setup).await;
        None
    }

    /// Keeps nothing: what it holds is looked at where a job fleeces.
    fn target(disk: &GuestDisk, name: &str) -> Value {
        let size = disk.model.borrow().size_bytes();
        json!({"driver": "null-co", "node-name": name, "size": size})
    }

    /// Takes that of a disk away, once there is no export.
    pub(super) async fn end(setup: &Setup, disk: &GuestDisk) {
        let Some(filter) = disk.served_through.take() else {
            return;
        };
        let removed = setup.demand("blockdev-del", json!({"node-name": filter.name}));
        if removed.await {
            filter.remove_target(setup).await;
        }
    }

    async fn remove_target(&self, setup: &Setup) {
        if let Some(target) = &self.target {
            setup
                .demand("blockdev-del", json!({"node-name": target}))
                .await;
        }
    }
}

/// The part of a disk that a filter shows.
struct Shown {
    device: Arc<dyn BlockDevice>,
    /// Where in the disk the device begins.
    offset: u64,
}

async fn read_by(setup: Rc<Setup>, disk: Rc<GuestDisk>, shown: Shown, over: Rc<Cell<bool>>) {
    while !over.get() && setup.failure().is_none() {
        for _ in 0..setup.draw_apart(|rng| rng.below(40)) {
            vellum_io::lane::yield_now().await;
        }
        if let Err(failure) = read(&setup, &disk, &shown).await {
            setup.fail(failure.when("by a filter"));
        }
    }
}

async fn read(setup: &Setup, disk: &GuestDisk, shown: &Shown) -> Result<(), Failure> {
    let least = disk.model.borrow().least_size_bytes() - shown.offset;
    let size = least.min(shown.device.size_bytes());
    let most = 2 * disk.cluster_size_bytes.min(size / 2);
    let len = setup.draw_apart(|rng| rng.between(1, most));
    let offset = setup.draw_apart(|rng| rng.below(size - len + 1));
    let of_disk = shown.offset + offset;
    setup.note(format!("by a filter: {of_disk}+{len}"));
    let begun = disk.model.borrow_mut().begin_watch();
    let read = shown
        .device
        .read(offset, Buffer::zeroed(len as usize))
        .await;
    match read {
        Ok(buffer) => Ok(disk.model.borrow_mut().end_read(begun, of_disk, &buffer)?),
        Err(_) if setup.faulty => Ok(()),
        Err(error) => Err(Failure::error(FailureKind::Request, "read", &error)),
    }
}

//! What serves an export: one variant for each type.

use std::path::Path;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum_export::WhenFull;
use vellum_export::accounting::Accounting;
use vellum_export::nbd::Exports;
use vellum_graph::Nodes;
use vellum_graph::live::ShownBitmap;
use vellum_graph::wrap::WriteThrough;

use crate::failure::Failure;

use super::description::{Description, Wanted};
use super::fuse::ResizeInTurn;
use super::surroundings::{ExportPlace, Surroundings};

/// What serves an export.
#[derive(Debug)]
pub(super) enum Served {
    Nbd(Arc<vellum_export::nbd::Export>),
    Fuse(vellum_export::fuse::Export),
    VhostUserBlk(vellum_export::vhost_user_blk::Export),
}

impl Served {
    /// QEMU's name of the type.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Served::Nbd(_) => "nbd",
            Served::Fuse(_) => "fuse",
            Served::VhostUserBlk(_) => "vhost-user-blk",
        }
    }

    /// The name by which NBD clients ask for it.
    pub(super) fn name(&self) -> Option<String> {
        match self {
            Served::Nbd(export) => Some(export.name.clone()),
            Served::Fuse(_) | Served::VhostUserBlk(_) => None,
        }
    }

    /// What its clients have asked for.
    pub(super) fn accounting(&self) -> Arc<Accounting> {
        match self {
            Served::Nbd(export) => export.accounting.clone(),
            Served::Fuse(export) => export.accounting().clone(),
            Served::VhostUserBlk(export) => export.accounting().clone(),
        }
    }

    /// Whether an end would be noticed; users of a file come and go.
    pub(super) fn is_in_use(&self) -> bool {
        match self {
            Served::Nbd(export) => export.connections() > 0,
            Served::Fuse(_) => false,
            Served::VhostUserBlk(export) => export.connections() > 0,
        }
    }

    /// The file that it is mounted over.
    pub(super) fn mountpoint(&self) -> Option<&Path> {
        match self {
            Served::Fuse(export) => Some(export.mountpoint()),
            Served::Nbd(_) | Served::VhostUserBlk(_) => None,
        }
    }

    /// Where users find it.
    pub(super) fn place(&self) -> ExportPlace {
        match self {
            Served::Nbd(_) => ExportPlace::Server,
            Served::Fuse(export) => ExportPlace::File(export.mountpoint().to_owned()),
            Served::VhostUserBlk(_) => ExportPlace::Guest,
        }
    }

    /// Ends it; what its clients have begun is complete on return.
    pub(super) async fn end(self, offered: Option<Exports>) {
        match self {
            Served::Nbd(export) => {
                // The server is there as long as its exports are.
                if let Some(offered) = offered {
                    offered.remove(&export).await;
                }
            }
            Served::Fuse(export) => export.end().await,
            Served::VhostUserBlk(export) => export.end().await,
        }
    }
}

/// Serves a device, which stands for a node.
pub(super) async fn serve(
    wanted: Description,
    device: Arc<dyn BlockDevice>,
    nodes: &Nodes,
    joined: Option<u64>,
    around: Surroundings<'_>,
) -> Result<(Served, Vec<ShownBitmap>), Failure> {
    let has_log = matches!(wanted.kind, Wanted::VhostUserBlk(_));
    let device = match wanted.writable && !has_log {
        true => around.logs.flushed_with(device),
        false => device,
    };
    // What waits for room is made durable apart from being written.
    let device = match wanted.writethrough && wanted.when_full == WhenFull::Fail {
        true => WriteThrough::new(device),
        false => device,
    };
    match wanted.kind {
        Wanted::Nbd(nbd) => {
            let access = (wanted.writable, nodes);
            let what = (device, wanted.when_full);
            let export = nbd.serve(what, &wanted.node, access, wanted.origin, &around);
            let (export, bitmaps) = export.await?;
            Ok((Served::Nbd(export), bitmaps))
        }
        Wanted::Fuse(fuse) => {
            let device = match joined {
                Some(joined) => ResizeInTurn::new(device, nodes, &wanted.id, joined),
                None => device,
            };
            let what = (device, wanted.when_full);
            let export = fuse.serve(what, wanted.writable, &around);
            Ok((Served::Fuse(export.await?), Vec::new()))
        }
        Wanted::VhostUserBlk(disk) => {
            let mut disk = disk;
            disk.options.read_only = !wanted.writable;
            disk.options.write_through = wanted.writethrough;
            disk.options.when_full = wanted.when_full;
            disk.options.fair_depth = around.neighbours.clone();
            disk.options.logs = around.logs.clone();
            let export = disk.serve(device, &wanted.id, around.environment);
            Ok((Served::VhostUserBlk(export?), Vec::new()))
        }
    }
}

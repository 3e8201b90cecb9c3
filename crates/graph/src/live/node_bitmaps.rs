//! [`NodeBitmaps`]: the dirty bitmaps of a node beside those that its image holds, and which of all of them exports
//! show.

use std::sync::Arc;

use vellum::nodes::Recorder;
use vellum::qcow2::{BitmapView, MemoryBitmap};

use crate::node::foreign_image;
use crate::node::opened::{NodeKind, OpenedNode};

/// A node's bitmaps.
#[derive(Debug, Default)]
pub(crate) struct NodeBitmaps {
    pub(crate) recorder: Arc<Recorder>,
    /// The names of those that were added here, in that order.
    pub(crate) names: Vec<String>,
    /// Those that exports show, by their numbers.
    pub(crate) shown: Vec<(u64, ShownBitmap)>,
}

impl NodeBitmaps {
    /// Those that come with a node of a format other than qcow2.
    pub(crate) fn of(node: &OpenedNode) -> NodeBitmaps {
        let bitmaps = NodeBitmaps::default();
        // A filter shows what is below it, but has bitmaps of its own.
        if let NodeKind::Device(device) = &node.kind
            && device.info().format == node.driver.name
        {
            for bitmap in foreign_image::stored_bitmaps(&**device) {
                bitmaps.recorder.add(bitmap);
            }
        }
        bitmaps
    }
}

/// A device of any size has two bits of this.
const LARGEST_GRANULARITY_BYTES: u64 = 1 << 62;

/// A bitmap that an export shows.
#[derive(Debug, Clone)]
pub struct ShownBitmap {
    /// The node that has it.
    pub node: String,
    /// Unique among the bitmaps of that node.
    pub name: String,
    /// The node from which on it was looked for.
    pub from: String,
    /// What clients of the export see.
    pub view: BitmapView,
}

impl ShownBitmap {
    /// One that is looked for from a node on, and was not found.
    pub fn all_dirty(from: &str, name: &str) -> ShownBitmap {
        ShownBitmap {
            node: from.to_owned(),
            name: name.to_owned(),
            from: from.to_owned(),
            view: all_dirty(),
        }
    }
}

/// A view in which everything is dirty.
pub(crate) fn all_dirty() -> BitmapView {
    let size_bytes = 2 * LARGEST_GRANULARITY_BYTES;
    let bitmap = MemoryBitmap::new("", size_bytes, LARGEST_GRANULARITY_BYTES, false);
    bitmap.set(std::slice::from_ref(&(0..size_bytes)));
    bitmap.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bitmap_that_is_gone_calls_everything_dirty() {
        let view = all_dirty();
        assert_eq!(view.status(0, 1 << 40), (true, 1 << 40));
        let end = i64::MAX as u64;
        assert_eq!(view.status(end - 512, 512), (true, 512));
    }
}

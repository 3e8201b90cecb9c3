//! A bitmap asked about piece by piece, as the clients of a server do.

use std::sync::Arc;

use parking_lot::RwLock;
use vellum_io::Result;

use super::dirty::Dirty;
use super::memory::MemoryBitmap;
use crate::qcow2::image::Image;

/// One bitmap at each moment: of an open image, or one in memory.
///
/// While the bitmap records writes, an answer is that of the moment of the question; what
/// has ended before it is in it. One of an image that did not record when the view was made
/// is seen as it was then. Clones see the same.
#[derive(Debug, Clone)]
pub struct BitmapView(Arc<RwLock<Viewed>>);

#[derive(Debug, Clone)]
enum Viewed {
    Memory(Arc<MemoryBitmap>),
    Image {
        image: Arc<Image>,
        name: Vec<u8>,
        /// The bits of a bitmap that did not record.
        still: Option<Arc<Dirty>>,
    },
}

impl BitmapView {
    pub(super) async fn new(image: Arc<Image>, name: &str) -> Result<Self> {
        let bits = image.read_bitmap(name).await?;
        let name = name.as_bytes().to_vec();
        let records = image.bitmaps.live().find(&name).is_some();
        let still = (!records).then(|| Arc::new(bits));
        Ok(BitmapView::of(Viewed::Image { image, name, still }))
    }

    fn of(viewed: Viewed) -> Self {
        BitmapView(Arc::new(RwLock::new(viewed)))
    }

    /// Has this view, and all clones of it, show what another one shows now: that of the same image,
    /// which was opened anew, say. An image that was closed notes no writes any more.
    pub fn turn_to(&self, other: &BitmapView) {
        let viewed = other.0.read().clone();
        *self.0.write() = viewed;
    }

    /// Whether the byte at `offset_bytes` is dirty, and how many bytes from there on, at
    /// most `len_bytes`, are alike. What lies beyond the end of the device is clean.
    ///
    /// If the bitmap of an image was recording and is not any more, everything is dirty.
    pub fn status(&self, offset_bytes: u64, len_bytes: u64) -> (bool, u64) {
        let viewed = self.0.read();
        let (image, name, still) = match &*viewed {
            Viewed::Memory(bitmap) => return bitmap.status(offset_bytes, len_bytes),
            Viewed::Image { image, name, still } => (image, name, still),
        };
        if let Some(bitmap) = image.bitmaps.live().find(name) {
            return bitmap.dirty.status(offset_bytes, len_bytes);
        }
        match still {
            Some(still) => still.status(offset_bytes, len_bytes),
            None => (true, len_bytes),
        }
    }
}

impl From<Arc<MemoryBitmap>> for BitmapView {
    fn from(bitmap: Arc<MemoryBitmap>) -> Self {
        BitmapView::of(Viewed::Memory(bitmap))
    }
}

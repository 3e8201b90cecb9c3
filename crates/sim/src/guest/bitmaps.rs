//! Changes of the bitmaps beside the requests, and what a cut has left of them.

use std::rc::Rc;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum::qcow2::AsQcow2;
use vellum::qcow2::{BitmapOptions, Bitmaps};

use super::Guest;
use crate::bitmap::{FIRST, SECOND, find};
use crate::failure::{Failure, FailureKind};
use crate::scenario::BitmapChange;

/// Makes a change that the model knows of, beside the requests that run.
pub(super) async fn change(
    guest: Rc<Guest>,
    device: Arc<dyn BlockDevice>,
    change: BitmapChange,
) -> Result<(), Failure> {
    if let (Some(bits), Some(image)) = (guest.options.bitmap_bits, device.as_qcow2()) {
        let has_second = guest.model.borrow().has_second_bitmap();
        let applied = apply(&image.bitmaps(), change, bits, has_second).await;
        match applied {
            Ok(()) => {}
            Err(error) if guest.excuses(&error) => return Ok(()),
            Err(error) => return Err(Failure::error(FailureKind::Request, change, &error)),
        }
    }
    guest.model.borrow_mut().end_bitmap_change();
    Ok(())
}

async fn apply(
    bitmaps: &Bitmaps,
    change: BitmapChange,
    bits: u32,
    has_second: bool,
) -> vellum::Result<()> {
    match change {
        BitmapChange::Clear => bitmaps.clear(FIRST).await,
        BitmapChange::Disable => bitmaps.disable(FIRST).await,
        BitmapChange::Enable => bitmaps.enable(FIRST).await,
        BitmapChange::Second if has_second => bitmaps.remove(SECOND).await,
        BitmapChange::Second => {
            let new = BitmapOptions::default()
                .granularity_bytes(Some(1 << bits))
                .disabled(true);
            bitmaps.add(SECOND, new).await?;
            let first = bitmaps.read(FIRST).await?;
            bitmaps.merge(SECOND, vec![first]).await
        }
    }
}

/// Checks the bitmaps of an image whose sectors were read just before.
pub(super) async fn check(guest: &Guest, device: &dyn BlockDevice) -> Result<(), Failure> {
    let (Some(_), Some(image)) = (guest.options.bitmap_bits, device.as_qcow2()) else {
        return Ok(());
    };
    let found = find(&image.bitmaps(), (FIRST, SECOND)).await?;
    found.check(&mut guest.model.borrow_mut())
}

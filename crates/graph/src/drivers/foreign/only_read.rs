//! Formats that are only read: Bochs' growing images, compressed loop images, Apple's disk images.

use std::sync::Arc;

use vellum::{BlockDevice, Result, Storage};
use vellum_foreign::{bochs, cloop, dmg};

use super::format::{ForeignFormat, Opening, Pending};

pub(crate) const BOCHS: ForeignFormat = format("bochs", |opening| {
    Box::pin(async move { Ok(bochs::open(file(opening)?).await? as Arc<dyn BlockDevice>) })
});

pub(crate) const CLOOP: ForeignFormat = format("cloop", |opening| {
    Box::pin(async move { Ok(cloop::open(file(opening)?).await? as Arc<dyn BlockDevice>) })
});

pub(crate) const DMG: ForeignFormat = format("dmg", |opening| {
    Box::pin(async move { Ok(dmg::open(file(opening)?).await? as Arc<dyn BlockDevice>) })
});

const fn format(
    name: &'static str,
    open: fn(Opening) -> Pending<'static, Arc<dyn BlockDevice>>,
) -> ForeignFormat {
    ForeignFormat {
        name,
        open,
        create: None,
        check: None,
        repairs: false,
        options: &[],
        compresses: false,
        has_backing: false,
    }
}

/// The file of an image that is opened to be read, with no options beside it.
fn file(opening: Opening) -> Result<Arc<dyn Storage>> {
    opening.no_more_options()?;
    opening.only_reads()?;
    Ok(opening.file)
}

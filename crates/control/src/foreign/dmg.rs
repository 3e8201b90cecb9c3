//! Apple's disk images, which are only read.

use std::sync::Arc;

use vellum::{BlockDevice, Result};
use vellum_foreign::dmg;

use super::{ForeignFormat, Opening};

pub(super) const FORMAT: ForeignFormat = ForeignFormat {
    name: "dmg",
    open: |opening| Box::pin(open(opening)),
    create: None,
    check: None,
    repairs: false,
    options: &[],
    compresses: false,
    has_backing: false,
};

async fn open(opening: Opening) -> Result<Arc<dyn BlockDevice>> {
    opening.no_more_options()?;
    opening.only_reads()?;
    Ok(dmg::open(opening.file).await?)
}

//! Growing images of Bochs, which are only read.

use std::sync::Arc;

use vellum::{BlockDevice, Result};
use vellum_foreign::bochs;

use super::{ForeignFormat, Opening};

pub(super) const FORMAT: ForeignFormat = ForeignFormat {
    name: "bochs",
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
    Ok(bochs::open(opening.file).await?)
}

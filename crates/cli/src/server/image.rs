//! Opening the image that is served.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum_graph::open_device;
use vellum_images::overlay;
use vellum_options::{ImageSpec, OpenFlags};

use super::Failure;
use crate::img::snapshot;
use crate::report;

/// An image, and what of it is shown.
#[derive(Debug)]
pub struct ServedImage<'a> {
    pub name: &'a str,
    pub format: Option<&'a str>,
    /// The name is a list of options.
    pub image_opts: bool,
    /// How it is opened; writable unless changes are thrown away or refused.
    pub flags: OpenFlags,
    /// Changes are thrown away.
    pub temporary: bool,
    /// An internal snapshot, as the user names it.
    pub snapshot: Option<&'a str>,
}

impl ServedImage<'_> {
    /// Opens it.
    pub async fn open(self) -> Result<Arc<dyn BlockDevice>, Failure> {
        let name = self.name;
        let failed = |error: vellum_io::Error| {
            let text = report::error_text(&error);
            Failure::message(format!("Failed to open '{name}': {text}"))
        };
        let spec = ImageSpec::from_argument(name, self.image_opts, self.format);
        let spec = spec.map_err(failed)?;
        let device = open_device(&spec, &self.flags).await.map_err(failed)?;
        if self.temporary {
            return overlay::put_on(device).await.map_err(failed);
        }
        let Some(text) = self.snapshot else {
            return Ok(device);
        };
        let shown = match snapshot::selector(text) {
            Ok(selector) => snapshot::shown(&device, selector).await.map_err(failed),
            Err(_) => {
                let text = format!("Failed in parsing snapshot param `{text}'");
                Err(Failure::message(text))
            }
        };
        if shown.is_err() {
            // The first error is the one to report.
            let _ = device.close().await;
        }
        shown
    }
}

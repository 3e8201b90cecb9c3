//! The dirty bitmaps that an export shows.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum::qcow2::{AsQcow2, BitmapView};
use vellum_graph::foreign;
use vellum_options::error_text;

use crate::failure::Failure;

/// Finds bitmaps by their names, each in the device or in the next image below it that
/// has one of the name.
///
/// # Errors
/// If there is none of a name, or it cannot be shown.
pub async fn find(
    device: &Arc<dyn BlockDevice>,
    names: &[String],
    read_only_export: bool,
) -> Result<Vec<(String, BitmapView)>, Failure> {
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        found.push((
            name.clone(),
            find_one(device, name, read_only_export).await?,
        ));
    }
    Ok(found)
}

async fn find_one(
    device: &Arc<dyn BlockDevice>,
    name: &str,
    read_only_export: bool,
) -> Result<BitmapView, Failure> {
    let failed = |error: vellum::Error| Failure(error_text(&error));
    let mut layer = Some(device.clone());
    while let Some(device) = layer {
        let device = device.stands_for().unwrap_or(device);
        if let Some(image) = device.as_qcow2() {
            let list = image.bitmaps().list().await.map_err(failed)?;
            if let Some(info) = list.iter().find(|info| info.name == name) {
                let changes = !device.info().read_only;
                if read_only_export && changes && info.auto && info.consistent {
                    return Err(Failure(format!(
                        "Enabled bitmap '{name}' incompatible with readonly export"
                    )));
                }
                let view = image.bitmaps().view(name).await;
                return view.map_err(|error| Failure(with_hint(error_text(&error))));
            }
        }
        let stored = foreign::stored_bitmaps(&*device);
        if let Some(bitmap) = stored.into_iter().find(|bitmap| bitmap.name() == name) {
            return Ok(bitmap.into());
        }
        layer = device.backing();
    }
    Err(Failure(format!("Bitmap '{name}' is not found")))
}

/// An error with the line that QEMU adds where a bitmap is inconsistent.
pub fn with_hint(message: String) -> String {
    match message.ends_with("is inconsistent and cannot be used") {
        true => message + "\nTry block-dirty-bitmap-remove to delete this bitmap from disk",
        false => message,
    }
}

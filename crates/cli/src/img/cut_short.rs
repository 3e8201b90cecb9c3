//! Refuses to copy data of an image whose file was cut short: the missing clusters would be copied as
//! zeroes. Only under the program's own name, as QEMU copies the zeroes.

use std::sync::Arc;

use vellum::qcow2::AsQcow2;
use vellum::qcow2::check::cut_short;
use vellum::{BlockDevice, target_of};
use vellum_format::features::Compatible;

use super::command::{Failure, fail, open_failure};
use super::common::layers;
use crate::report;

/// What is missing in the file of a qcow2 image.
async fn of(device: &dyn BlockDevice) -> vellum::Result<Option<String>> {
    match device.storage() {
        Some(storage) if device.as_qcow2().is_some() => {
            let found = cut_short(storage).await?;
            Ok(found.map(|found| found.to_string()))
        }
        _ => Ok(None),
    }
}

/// What is said of an image whose file has grown again.
fn was_cut(device: &dyn BlockDevice) -> Option<String> {
    let header = device.as_qcow2()?.header();
    let was_cut = header.compatible.contains(Compatible::WAS_CUT_SHORT);
    was_cut.then(|| "the file was cut short before it grew again, and data is lost".to_owned())
}

/// Refuses sources of which an image or a layer below lacks data that it refers to.
pub async fn refuse(sources: &[Arc<dyn BlockDevice>]) -> Result<(), Failure> {
    if !report::is_own_name(report::program()) {
        return Ok(());
    }
    for layer in sources.iter().flat_map(layers) {
        let layer = target_of(&*layer).unwrap_or(layer);
        let name = layer.storage().map(|storage| storage.name().to_owned());
        let name = name.unwrap_or_default();
        let found = of(&*layer).await;
        let found = found.map_err(|error| open_failure(&name, &error))?;
        if let Some(found) = found.or_else(|| was_cut(&*layer)) {
            return fail(format!(
                "'{name}': {found}. Use a complete copy of the file, or make an image in which the missing data reads as \
                 zeroes with 'vellum convert --accept-missing'"
            ));
        }
    }
    Ok(())
}

//! Checks, which find what QEMU's finds, and as it does, end at the first damage.

use std::sync::Arc;

use vellum::{Result, Storage};

use super::descriptor::Descriptor;
use super::extent::{Extent, Kind};
use super::header::SECTOR_BYTES;
use super::open::{OpenOptions, open_layout};
use super::sesparse::Grain;
use super::sparse::Sparse;
use crate::facts::CheckReport;
use crate::fields::read_at;
use crate::layout::Layout;

/// Looks for entries that lead behind the end of their file, or nowhere. Files as for [`super::open()`].
///
/// # Errors
/// As opening the image.
pub async fn check(
    file: Arc<dyn Storage>,
    descriptor: Descriptor,
    extents: Vec<Arc<dyn Storage>>,
) -> Result<CheckReport> {
    let options = OpenOptions::default().read_only(true);
    let layout = open_layout(file, descriptor, extents, None, &options).await?;
    let mut report = CheckReport::default();
    for extent in &layout.extents {
        let Some(file) = layout.files().get(extent.file) else {
            continue;
        };
        if let Some(finding) = check_extent(extent, &**file).await? {
            report.corruption(finding);
            // QEMU goes no further, and says that it failed.
            report.check_errors = 1;
            break;
        }
    }
    Ok(report)
}

async fn check_extent(extent: &Extent, file: &dyn Storage) -> Result<Option<String>> {
    let file_bytes = file.len_bytes()?;
    match &extent.kind {
        Kind::Flat { offset_bytes } => Ok((*offset_bytes >= file_bytes && extent.len_bytes > 0)
            .then(|| beyond(extent.start_bytes))),
        Kind::Sparse(sparse) => check_sparse(extent, sparse, file, file_bytes).await,
    }
}

fn beyond(guest_bytes: u64) -> String {
    let sector = guest_bytes / SECTOR_BYTES;
    format!("ERROR: cluster offset for sector {sector} points after EOF")
}

fn nowhere(guest_bytes: u64) -> String {
    let sector = guest_bytes / SECTOR_BYTES;
    format!("ERROR: could not get cluster_offset for sector {sector}")
}

async fn check_sparse(
    extent: &Extent,
    sparse: &Sparse,
    file: &dyn Storage,
    file_bytes: u64,
) -> Result<Option<String>> {
    let grain_bytes = sparse.geometry.grain_bytes();
    let covered_bytes = grain_bytes * u64::from(sparse.geometry.table_entries);
    let mut inside_bytes = 0;
    while inside_bytes < extent.len_bytes {
        let (table, _) = sparse.indices(inside_bytes);
        let Ok(at_bytes) = sparse.table_bytes(table, inside_bytes) else {
            return Ok(Some(nowhere(extent.start_bytes + inside_bytes)));
        };
        if at_bytes != 0 {
            let bytes = read_at(file, at_bytes, sparse.geometry.table_bytes()).await?;
            let rest = (extent.len_bytes - inside_bytes).div_ceil(grain_bytes);
            let rest = usize::try_from(rest).unwrap_or(usize::MAX);
            for index in 0..rest.min(sparse.geometry.table_entries as usize) {
                let guest_bytes = extent.start_bytes + inside_bytes + index as u64 * grain_bytes;
                match sparse.grain(&bytes, index) {
                    None => return Ok(Some(nowhere(guest_bytes))),
                    Some(Grain::Sector(sector)) if sector * SECTOR_BYTES >= file_bytes => {
                        return Ok(Some(beyond(guest_bytes)));
                    }
                    Some(_) => {}
                }
            }
        }
        inside_bytes += covered_bytes;
    }
    Ok(None)
}

//! Checks, which find what QEMU's finds.

use vellum::{Result, Storage};

use super::header::allocated;
use super::layout::read;
use crate::facts::CheckReport;

/// Looks for blocks in one place, blocks beyond the image, and a wrong count.
///
/// # Errors
/// As opening the image.
pub async fn check(file: &dyn Storage) -> Result<CheckReport> {
    let (header, map) = read(file).await?;
    let mut report = CheckReport::default();
    let mut users: Vec<bool> = vec![false; map.values().len()];
    let mut count = 0;
    for (index, &entry) in map.values().iter().enumerate() {
        let Some(place) = allocated(entry) else {
            continue;
        };
        match users.get_mut(place as usize) {
            None => report.corruption(format!("ERROR: block index {index} too large, is {place}")),
            Some(is_used) => {
                count += 1;
                if std::mem::replace(is_used, true) {
                    report.corruption(format!("ERROR: block index {place} also used by {place}"));
                }
            }
        }
    }
    if count != header.allocated_blocks {
        report.corruption(format!(
            "ERROR: allocated blocks mismatch, is {count}, should be {}",
            header.allocated_blocks
        ));
    }
    Ok(report)
}

//! Checks, which find what QEMU's finds.

use vellum::{Result, Storage};

use super::header::allocated;
use super::layout::read;

/// What a check found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// What is wrong, a line each; at most so many lines as there are blocks.
    pub corruptions: Vec<String>,
    /// Blocks of the image.
    pub blocks: u64,
    /// Blocks that have a place.
    pub allocated_blocks: u64,
}

/// Looks for blocks in one place, blocks beyond the image, and a wrong count.
///
/// # Errors
/// As opening the image.
pub async fn check(file: &dyn Storage) -> Result<CheckReport> {
    let (header, map) = read(file).await?;
    let mut report = CheckReport {
        blocks: u64::from(header.blocks),
        ..CheckReport::default()
    };
    let mut users: Vec<bool> = vec![false; map.values().len()];
    let mut count = 0;
    for (index, &entry) in map.values().iter().enumerate() {
        let Some(place) = allocated(entry) else {
            continue;
        };
        let line = match users.get_mut(place as usize) {
            None => format!("ERROR: block index {index} too large, is {place}"),
            Some(is_used) => {
                count += 1;
                match std::mem::replace(is_used, true) {
                    false => continue,
                    true => format!("ERROR: block index {place} also used by {place}"),
                }
            }
        };
        report.corruptions.push(line);
    }
    if count != header.allocated_blocks {
        let should = header.allocated_blocks;
        report.corruptions.push(format!(
            "ERROR: allocated blocks mismatch, is {count}, should be {should}"
        ));
    }
    report.allocated_blocks = u64::from(count);
    Ok(report)
}

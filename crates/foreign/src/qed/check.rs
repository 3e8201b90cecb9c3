//! Checks and repairs, which find and mend what QEMU's do.
//!
//! Entries that lead nowhere are cleared, so that they read as what is below. Clusters that two entries
//! lead to are told and left as they are, and so are clusters that nothing leads to, but for those at the end of a
//! file that is about to be written to.

use std::sync::Arc;

use vellum::{Result, Storage};

use super::Header;
use super::header::ZERO;
use crate::clusters::Clusters;
use crate::facts::{CheckReport, ClusterCounts, Fix};
use crate::fields::{barrier, read_at, write_at};
use crate::paged::Width;

/// Tables are read in pieces of this size.
const PIECE_BYTES: u64 = 1 << 20;

struct Check<'a> {
    file: &'a dyn Storage,
    header: Header,
    end_bytes: u64,
    mends: bool,
    used: Clusters,
    /// Where the last of them ends.
    used_end_bytes: u64,
    counts: ClusterCounts,
    report: CheckReport,
}

/// Looks for entries that lead nowhere or to one place, and for clusters that nothing leads to.
///
/// # Errors
/// As opening the image.
pub async fn check(file: &Arc<dyn Storage>) -> Result<CheckReport> {
    repair(file, Fix::default()).await
}

/// As [`check`], and mends what can be mended, whatever of it is asked for. An image in which nothing
/// is wrong any more is not marked any more.
///
/// # Errors
/// As opening the image; if a write fails.
pub async fn repair(file: &Arc<dyn Storage>, fix: Fix) -> Result<CheckReport> {
    run(file, fix, false).await
}

/// As [`repair`], of an image that is about to be written to: what stands at the end of its file and nothing leads to, which a change
/// that was cut off has left, is cut off. Nobody would use it again.
///
/// # Errors
/// As there.
pub(super) async fn repair_to_write(file: &Arc<dyn Storage>) -> Result<()> {
    let fix = Fix {
        leaks: true,
        corruptions: true,
    };
    run(file, fix, true).await.map(drop)
}

async fn run(file: &Arc<dyn Storage>, fix: Fix, cuts: bool) -> Result<CheckReport> {
    let (mut header, _) = super::read(file).await?;
    let mut check = Check {
        file: &**file,
        header,
        end_bytes: header.end_bytes(file.len_bytes()?),
        mends: fix.leaks || fix.corruptions,
        used: Clusters::default(),
        used_end_bytes: header.header_bytes(),
        counts: ClusterCounts {
            total: header.size_bytes.div_ceil(header.cluster_bytes.into()),
            ..ClusterCounts::default()
        },
        report: CheckReport::default(),
    };
    check.run().await?;
    let report = &check.report;
    if check.mends && report.corruptions == 0 && report.check_errors == 0 {
        if cuts && file.capabilities().growable && check.used_end_bytes < file.len_bytes()? {
            file.truncate(check.used_end_bytes).await?;
        }
        barrier(&**file).await?;
        if header.needs_check() {
            header.set_needs_check(false);
            write_at(&**file, 0, &header.encode()).await?;
            barrier(&**file).await?;
        }
    }
    Ok(CheckReport {
        clusters: Some(check.counts),
        ..check.report
    })
}

impl Check<'_> {
    async fn run(&mut self) -> Result<()> {
        let start = self.header.l1_offset_bytes;
        self.mark(start, self.header.table_clusters);
        let mut at = 0;
        while at < self.header.table_bytes() {
            let (len, mut entries) = self.read_piece(start + at).await?;
            let mut has_changed = false;
            for entry in entries.iter_mut().filter(|entry| **entry != 0) {
                if !self.header.is_table_place(*entry, self.end_bytes) {
                    has_changed |= self.clear(entry);
                } else if self.mark(*entry, self.header.table_clusters) {
                    self.check_leaf(*entry).await?;
                }
            }
            if has_changed {
                self.write_piece(start + at, &entries).await?;
            }
            at += len;
        }
        let clusters = self.end_bytes / u64::from(self.header.cluster_bytes);
        let behind_header = clusters.saturating_sub(self.header.header_clusters.into());
        self.report.leaks = behind_header.saturating_sub(self.used.len());
        Ok(())
    }

    async fn check_leaf(&mut self, start_bytes: u64) -> Result<()> {
        let cluster_bytes = u64::from(self.header.cluster_bytes);
        let mut before = None;
        let mut at = 0;
        while at < self.header.table_bytes() {
            let (len, mut entries) = self.read_piece(start_bytes + at).await?;
            let mut has_changed = false;
            for entry in entries.iter_mut().filter(|entry| **entry > ZERO) {
                self.counts.allocated += 1;
                if before.is_some_and(|before: u64| before.wrapping_add(cluster_bytes) != *entry) {
                    self.counts.fragmented += 1;
                }
                before = Some(*entry);
                if self.header.is_cluster_place(*entry, self.end_bytes) {
                    self.mark(*entry, 1);
                } else {
                    has_changed |= self.clear(entry);
                }
            }
            if has_changed {
                self.write_piece(start_bytes + at, &entries).await?;
            }
            at += len;
        }
        Ok(())
    }

    /// Counts an entry that leads nowhere, and clears it; whether it did.
    fn clear(&mut self, entry: &mut u64) -> bool {
        if self.mends {
            self.report.corruptions_fixed += 1;
            *entry = 0;
        } else {
            self.report.corruptions += 1;
        }
        self.mends
    }

    /// Notes that something leads to clusters; `false` if something did before.
    fn mark(&mut self, offset_bytes: u64, clusters: u32) -> bool {
        let cluster_bytes = u64::from(self.header.cluster_bytes);
        let first = offset_bytes / cluster_bytes;
        let end_bytes = (first + u64::from(clusters)) * cluster_bytes;
        self.used_end_bytes = self.used_end_bytes.max(end_bytes);
        let mut is_first = true;
        for cluster in first..first + u64::from(clusters) {
            if !self.used.insert(cluster) {
                self.report.corruptions += 1;
                is_first = false;
            }
        }
        is_first
    }

    async fn read_piece(&self, offset_bytes: u64) -> Result<(u64, Vec<u64>)> {
        let len = PIECE_BYTES.min(self.header.table_bytes());
        let bytes = read_at(self.file, offset_bytes, len as usize).await?;
        Ok((len, Width::Le64.decode(&bytes)))
    }

    async fn write_piece(&self, offset_bytes: u64, entries: &[u64]) -> Result<()> {
        let bytes: Vec<u8> = entries
            .iter()
            .flat_map(|entry| entry.to_le_bytes())
            .collect();
        write_at(self.file, offset_bytes, &bytes).await
    }
}

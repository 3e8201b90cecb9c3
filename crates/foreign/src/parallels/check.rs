//! Checks and repairs, which find and mend what QEMU's do, in its order and its words.

use std::sync::Arc;

use vellum::{Result, Storage};

use super::Header;
use super::header::{DATA_OFFSET_AT, HEADER_BYTES, IN_USE_AT, SECTOR_BYTES};
use super::layout::PIECE_BYTES;
use crate::clusters::Clusters;
use crate::facts::{CheckReport, ClusterCounts, Fix};
use crate::fields::{barrier, read_at, write_at};
use crate::paged::Width;

/// Clusters are copied in pieces of this size.
const COPY_BYTES: u64 = 1 << 20;

struct Check<'a> {
    file: &'a dyn Storage,
    header: Header,
    fix: Fix,
    /// Where the last cluster ends.
    end_bytes: u64,
    used: Clusters,
    counts: ClusterCounts,
    report: CheckReport,
}

/// Looks for the mark of use, a wrong start of the data, entries that lead out of the file or to one
/// place, and space behind the last cluster.
///
/// # Errors
/// As opening the image.
pub async fn check(file: &Arc<dyn Storage>) -> Result<CheckReport> {
    repair(file, Fix::default()).await
}

/// As [`check`], and mends what is asked for. Of two entries that lead to one place the second gets
/// a copy.
///
/// # Errors
/// As opening the image; if a write fails.
pub async fn repair(file: &Arc<dyn Storage>, fix: Fix) -> Result<CheckReport> {
    let header = super::read(&**file).await;
    let header = header.map_err(|error| error.target(file.name()))?;
    let mut check = Check {
        file: &**file,
        header,
        fix,
        end_bytes: header.data_bytes(),
        used: Clusters::default(),
        counts: ClusterCounts {
            total: header.entries.into(),
            ..ClusterCounts::default()
        },
        report: CheckReport::default(),
    };
    check.header().await?;
    check.places().await?;
    check.leaks().await?;
    check.duplicates().await?;
    if fix.corruptions || fix.leaks {
        barrier(&**file).await?;
    }
    if header.is_in_use && fix.corruptions {
        // Last, when all the rest is durable.
        write_at(&**file, IN_USE_AT, &0u32.to_le_bytes()).await?;
        barrier(&**file).await?;
    }
    Ok(CheckReport {
        clusters: Some(check.counts),
        image_end_bytes: Some(check.end_bytes),
        ..check.report
    })
}

impl Check<'_> {
    /// Counts damage that is mended if that was asked for, and says so.
    fn damage(&mut self, message: &str) {
        let report = &mut self.report;
        let word = match self.fix.corruptions {
            true => {
                report.corruptions_fixed += 1;
                "Repairing"
            }
            false => {
                report.corruptions += 1;
                "ERROR"
            }
        };
        report.message(format!("{word} {message}"));
    }

    async fn header(&mut self) -> Result<()> {
        if self.header.is_in_use {
            self.damage("image was not closed correctly");
        }
        if !self.header.has_good_data_offset {
            self.damage("data_off field has incorrect value");
            if self.fix.corruptions {
                let right = self.header.data_sectors.to_le_bytes();
                write_at(self.file, DATA_OFFSET_AT, &right).await?;
                // The data has to begin inside of the file.
                if self.file.len_bytes()? < self.header.data_bytes() {
                    self.file.truncate(self.header.data_bytes()).await?;
                }
            }
        }
        Ok(())
    }

    /// Clears entries that lead out of the file, and finds the last cluster.
    async fn places(&mut self) -> Result<()> {
        let file_bytes = self.file.len_bytes()?.next_multiple_of(SECTOR_BYTES);
        let mut at = 0;
        while let Some((len, mut entries)) = self.read_piece(at).await? {
            let mut has_changed = false;
            for (index, entry) in (at / 4..)
                .zip(&mut entries)
                .filter(|(_, entry)| **entry != 0)
            {
                let offset = self.header.offset_bytes(*entry);
                if self.header.is_place(offset, file_bytes) {
                    self.end_bytes = self.end_bytes.max(offset + self.header.cluster_bytes());
                    continue;
                }
                self.damage(&format!("cluster {index} is outside image"));
                if self.fix.corruptions {
                    *entry = 0;
                    has_changed = true;
                }
            }
            if has_changed {
                self.write_piece(at, &entries).await?;
            }
            at += len;
        }
        Ok(())
    }

    /// Cuts off what is behind the last cluster.
    async fn leaks(&mut self) -> Result<()> {
        let file_bytes = self.file.len_bytes()?.next_multiple_of(SECTOR_BYTES);
        let leaked_bytes = file_bytes.saturating_sub(self.end_bytes);
        // What is not in the table may be the format extension's.
        if leaked_bytes == 0 || self.header.extension_sectors != 0 {
            return Ok(());
        }
        let clusters = leaked_bytes.div_ceil(self.header.cluster_bytes());
        let word = match self.fix.leaks {
            true => {
                // Entries that led there are gone for good before the space is.
                barrier(self.file).await?;
                self.file.truncate(self.end_bytes).await?;
                self.report.leaks_fixed += clusters;
                "Repairing"
            }
            false => {
                self.report.leaks += clusters;
                "ERROR"
            }
        };
        self.report.message(format!(
            "{word} space leaked at the end of the image {leaked_bytes}"
        ));
        Ok(())
    }

    /// Finds entries that lead to one place, and counts the others.
    async fn duplicates(&mut self) -> Result<()> {
        let cluster_bytes = self.header.cluster_bytes();
        let mut before = None;
        let mut at = 0;
        while let Some((len, mut entries)) = self.read_piece(at).await? {
            let mut has_changed = false;
            for (index, entry) in (at / 4..).zip(&mut entries) {
                let mut offset = self.header.offset_bytes(*entry);
                if *entry == 0 || !self.header.is_place(offset, self.end_bytes) {
                    before = None;
                    continue;
                }
                if !self.used.insert(self.header.cluster_at(offset)) {
                    self.damage(&format!("duplicate offset in BAT entry {index}"));
                    if self.fix.corruptions {
                        offset = self.copy(offset).await?;
                        *entry = self.header.entry(offset).unwrap_or(0).into();
                        has_changed = true;
                    }
                }
                self.counts.allocated += 1;
                if before.is_some_and(|before: u64| before + cluster_bytes != offset) {
                    self.counts.fragmented += 1;
                }
                before = Some(offset);
            }
            if has_changed {
                barrier(self.file).await?;
                self.write_piece(at, &entries).await?;
            }
            at += len;
        }
        Ok(())
    }

    /// Copies a cluster to the end of the image.
    async fn copy(&mut self, from_bytes: u64) -> Result<u64> {
        let cluster_bytes = self.header.cluster_bytes();
        let data_bytes = self.header.data_bytes();
        let clusters = (self.end_bytes - data_bytes).div_ceil(cluster_bytes);
        let to_bytes = self.header.cluster_offset_bytes(clusters);
        let mut at = 0;
        while at < cluster_bytes {
            let len = COPY_BYTES.min(cluster_bytes - at);
            let bytes = read_at(self.file, from_bytes.saturating_add(at), len as usize).await?;
            write_at(self.file, to_bytes.saturating_add(at), &bytes).await?;
            at += len;
        }
        self.used.insert(clusters);
        self.end_bytes = to_bytes.saturating_add(cluster_bytes);
        Ok(to_bytes)
    }

    /// Entries of the table from a byte of it on; `None` behind its end.
    async fn read_piece(&self, at: u64) -> Result<Option<(u64, Vec<u64>)>> {
        let table_bytes = self.header.table_bytes(self.file.len_bytes()?);
        let rest = table_bytes.saturating_sub(at);
        if rest == 0 {
            return Ok(None);
        }
        let len = PIECE_BYTES.min(rest);
        let bytes = read_at(self.file, HEADER_BYTES as u64 + at, len as usize).await?;
        Ok(Some((len, Width::Le32.decode(&bytes))))
    }

    async fn write_piece(&self, at: u64, entries: &[u64]) -> Result<()> {
        let entries = entries.iter().map(|&entry| (entry as u32).to_le_bytes());
        let bytes: Vec<u8> = entries.flatten().collect();
        write_at(self.file, HEADER_BYTES as u64 + at, &bytes).await
    }
}

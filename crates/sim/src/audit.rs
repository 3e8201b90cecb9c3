//! The simulator's own check of an image, written without the engine's.
//!
//! Invariants that it checks:
//! - no host cluster serves two purposes, or two guest clusters;
//! - no cluster has fewer counted than real references (more is a leak);
//! - an entry says COPIED exactly where the refcount is one;
//! - what a snapshot refers to never changes, unless a compaction moves it.

use std::fmt;

use crate::layout::{COPIED, Layout};
use crate::sparse_bytes::SparseBytes;

/// How far beyond the end of the file a host offset may point.
const SLACK_CLUSTERS: u64 = 4096;

/// What a host cluster is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    Nothing,
    Metadata(&'static str),
    L2(u64),
    Guest(u64),
    Compressed,
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Use::Nothing => f.write_str("nothing"),
            Use::Metadata(what) => f.write_str(what),
            Use::L2(index) => write!(f, "the L2 table {index}"),
            Use::Guest(cluster) => write!(f, "guest cluster {cluster}"),
            Use::Compressed => f.write_str("compressed clusters"),
        }
    }
}

/// What must stay as it was for as long as the snapshots live.
#[derive(Debug, Clone, Default)]
pub struct Frozen {
    pages: SparseBytes,
    /// Byte ranges: (offset, length).
    ranges: Vec<(u64, u64)>,
}

impl Frozen {
    /// Notes everything that the snapshots of an image refer to.
    pub fn of(pages: &SparseBytes) -> Result<Frozen, String> {
        let layout = Layout::parse(pages)?;
        let mut ranges = Vec::new();
        for &(offset, entries) in &layout.snapshots {
            ranges.push((offset, entries * 8));
            for (index, entry) in layout.read_l1(pages, offset, entries) {
                for mapped in layout.mappings(pages, index, entry) {
                    if mapped.is_zero(&layout) {
                        // Nobody reads what lies there.
                        continue;
                    }
                    let host = mapped.host().map(|host| (host, layout.cluster_bytes()));
                    ranges.extend(host.or(mapped.compressed(layout.cluster_bits)));
                }
            }
        }
        Ok(Frozen {
            pages: pages.clone(),
            ranges,
        })
    }
}

struct Audit<'a> {
    pages: &'a SparseBytes,
    layout: Layout,
    uses: Vec<(Use, u64)>,
    problems: Vec<String>,
}

/// Checks an image; gives what is wrong with it.
pub fn audit(pages: &SparseBytes, frozen: &Frozen) -> Vec<String> {
    let layout = match Layout::parse(pages) {
        Ok(layout) => layout,
        Err(message) => return vec![message],
    };
    let clusters = pages.len_bytes().div_ceil(layout.cluster_bytes());
    let uses = vec![(Use::Nothing, 0); clusters as usize];
    let mut audit = Audit {
        pages,
        layout,
        uses,
        problems: Vec::new(),
    };
    audit.count_metadata();
    audit.count_guest();
    audit.compare_refcounts();
    for &(offset, len) in &frozen.ranges {
        if !pages.same(&frozen.pages, offset, len) {
            audit
                .problems
                .push(format!("the snapshot's bytes at {offset:#x} have changed"));
        }
    }
    audit.problems
}

/// How an image uses the host clusters that it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Clusters that are counted and that nothing refers to, wherever they lie.
    pub leaked: u64,
    /// Where the last cluster ends that is counted.
    pub end_bytes: u64,
}

/// Counts leaked clusters, also those beyond the end of the file, and finds the last one in use.
pub fn usage(pages: &SparseBytes) -> Result<Usage, String> {
    let layout = Layout::parse(pages)?;
    let mut audit = Audit {
        pages,
        layout,
        uses: Vec::new(),
        problems: Vec::new(),
    };
    audit.count_metadata();
    audit.count_guest();
    let layout = &audit.layout;
    let mut usage = Usage {
        leaked: 0,
        end_bytes: 0,
    };
    for (index, block) in layout.blocks.iter().copied() {
        if block == 0 {
            continue;
        }
        let clusters = index * layout.block_entries()..(index + 1) * layout.block_entries();
        for cluster in clusters.filter(|cluster| layout.refcount(pages, *cluster) > 0) {
            let is_used = audit
                .uses
                .get(cluster as usize)
                .is_some_and(|(_, n)| *n > 0);
            usage.leaked += u64::from(!is_used);
            usage.end_bytes = (cluster + 1) * layout.cluster_bytes();
        }
    }
    Ok(usage)
}

impl Audit<'_> {
    fn count_metadata(&mut self) {
        let layout = &self.layout;
        let size = layout.cluster_bytes();
        let mut found = vec![
            (Use::Metadata("the header"), 0, size),
            (
                Use::Metadata("the L1 table"),
                layout.l1_offset,
                layout.l1_entries * 8,
            ),
            (
                Use::Metadata("the refcount table"),
                layout.table_offset,
                layout.table_clusters * size,
            ),
        ];
        let block = |(_, offset): &(u64, u64)| (Use::Metadata("a refcount block"), *offset, size);
        found.extend(layout.blocks.iter().map(block));
        if let Some((offset, len)) = layout.luks_header {
            found.push((Use::Metadata("the LUKS header"), offset, len));
        }
        if !layout.snapshots.is_empty() {
            let (offset, len) = layout.snapshot_table;
            found.push((Use::Metadata("the snapshot table"), offset, len));
        }
        let bitmap = |(what, at, len): &(&'static str, u64, u64)| (Use::Metadata(what), *at, *len);
        found.extend(layout.bitmaps.iter().map(bitmap));
        let table = |(at, n): &(u64, u64)| (Use::Metadata("a snapshot's L1 table"), *at, n * 8);
        found.extend(layout.snapshots.iter().map(table));
        for (what, offset, len) in found {
            self.count(what, offset, len);
        }
    }

    fn count_guest(&mut self) {
        let active = (self.layout.l1_offset, self.layout.l1_entries);
        let tables: Vec<_> = std::iter::once(active)
            .chain(self.layout.snapshots.iter().copied())
            .collect();
        for (number, (offset, entries)) in tables.into_iter().enumerate() {
            for (index, entry) in self.layout.read_l1(self.pages, offset, entries) {
                self.count_l2(index, entry, number == 0);
            }
        }
    }

    fn count_l2(&mut self, index: u64, l1_entry: u64, active: bool) {
        let size = self.layout.cluster_bytes();
        let table = l1_entry & !COPIED & !0x1ff;
        self.count(Use::L2(index), table, size);
        if active {
            self.check_copied("L1", index, l1_entry, table);
        }
        for mapped in self.layout.mappings(self.pages, index, l1_entry) {
            if let Some((offset, len)) = mapped.compressed(self.layout.cluster_bits) {
                self.count(Use::Compressed, offset, len);
            } else if let Some(host) = mapped.host().filter(|_| !self.layout.external_data) {
                self.count(Use::Guest(mapped.guest), host, size);
                if active {
                    self.check_copied("L2", mapped.guest, mapped.entry, host);
                }
            }
        }
    }

    fn check_copied(&mut self, table: &str, index: u64, entry: u64, host: u64) {
        let refcount = self
            .layout
            .refcount(self.pages, host >> self.layout.cluster_bits);
        if (entry & COPIED != 0) != (refcount == 1) {
            self.problems.push(format!(
                "the {table} entry {index} is {entry:#x}, but the refcount there is {refcount}"
            ));
        }
    }

    fn count(&mut self, what: Use, offset: u64, len: u64) {
        let size = self.layout.cluster_bytes();
        let last = (offset + len.max(1) - 1) / size;
        if last > self.pages.len_bytes() / size + SLACK_CLUSTERS {
            self.problems
                .push(format!("{what} lies far beyond the end, at {offset:#x}"));
            return;
        }
        if self.uses.len() as u64 <= last {
            self.uses.resize(last as usize + 1, (Use::Nothing, 0));
        }
        for cluster in offset / size..=last {
            let (user, count) = &mut self.uses[cluster as usize];
            if *user == Use::Nothing {
                *user = what;
            } else if *user != what || matches!(what, Use::Metadata(_)) {
                let at = cluster * size;
                self.problems
                    .push(format!("the host cluster {at:#x} is {user} and {what}"));
            }
            *count += 1;
        }
    }

    fn compare_refcounts(&mut self) {
        for (cluster, (user, count)) in self.uses.iter().enumerate().filter(|(_, (_, n))| *n > 0) {
            let refcount = self.layout.refcount(self.pages, cluster as u64);
            if refcount < *count {
                let at = cluster as u64 * self.layout.cluster_bytes();
                self.problems.push(format!(
                    "the host cluster {at:#x} ({user}) has refcount {refcount}, but {count} references"
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine;
    use crate::prepare::prepare;
    use crate::scenario::{ImageOptions, Op, Scenario};

    #[test]
    fn counted_clusters_that_nothing_refers_to_are_leaked() {
        let write = Op::Write {
            offset: 0,
            len: 8192,
            fua: false,
        };
        let scenario = Scenario {
            image: ImageOptions::plain(1 << 20, 12),
            setup: vec![write],
            preparations: Vec::new(),
            cycles: Vec::new(),
        };
        let machine = prepare(&engine(), &scenario).expect("an image");
        let mut pages = machine.files[0].clone();
        // Header, refcount table and block, L1 and L2 table, and two clusters of data.
        let used = Usage {
            leaked: 0,
            end_bytes: 7 * 4096,
        };
        assert_eq!(usage(&pages), Ok(used));
        let mut layout = Layout::parse(&pages).expect("an image");
        let end_bytes = layout.allocate(&mut pages, 3) + 3 * 4096;
        pages.set_len(7 * 4096);
        let leaking = Usage {
            leaked: 3,
            end_bytes,
        };
        assert_eq!(usage(&pages), Ok(leaking));
    }
}

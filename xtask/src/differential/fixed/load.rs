//! What `qemu-io` and its counterpart do to an image of fixed length: fill it in some order, discard
//! and rewrite parts of it.

use crate::random::Random;

/// Commands of a fill or of a rewrite, at most, so that a scenario takes about a second.
const MOST_COMMANDS: u64 = 500;
/// Requests in flight at once, at most.
const MOST_IN_FLIGHT: u64 = 24;

/// One run of the tool.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Pass discards on (`-d unmap`).
    pub unmaps: bool,
    /// `-t`, if any.
    pub cache: Option<&'static str>,
    /// Commands that stay together: requests in flight, and the wait for them.
    pub groups: Vec<Vec<String>>,
}

/// The order in which units are visited.
#[derive(Debug, Clone, Copy)]
enum Order {
    Ascending,
    Descending,
    Random,
    /// So many ascending streams, in turns.
    Streams(u64),
}

/// A generator of batches for a disk.
pub struct Load<'a> {
    random: &'a mut Random,
    size_bytes: u64,
    cluster_bytes: u64,
    /// What one command covers.
    unit_bytes: u64,
    /// Requests may be in flight together.
    is_concurrent: bool,
}

impl<'a> Load<'a> {
    /// For a disk of so many bytes, a multiple of the cluster size.
    pub fn new(
        random: &'a mut Random,
        size_bytes: u64,
        cluster_bytes: u64,
        is_concurrent: bool,
    ) -> Self {
        let clusters = size_bytes / cluster_bytes;
        let unit_clusters = clusters.div_ceil(MOST_COMMANDS);
        Load {
            random,
            size_bytes,
            cluster_bytes,
            unit_bytes: unit_clusters * cluster_bytes,
            is_concurrent,
        }
    }

    /// A fill, then rounds of discards and rewrites, in one to three runs of the tool.
    pub fn batches(&mut self) -> Vec<Batch> {
        let mut phases = vec![self.fill()];
        for _ in 0..self.random.between(0, 4) {
            phases.push(self.churn());
        }
        let mut batches: Vec<Batch> = Vec::new();
        for groups in phases {
            match batches.last_mut() {
                Some(last) if self.random.chance(65) => last.groups.extend(groups),
                _ => {
                    let batch = self.batch(groups);
                    batches.push(batch);
                }
            }
        }
        batches
    }

    /// A fill of a part of the disk, in a run of its own.
    pub fn part(&mut self, percent: u64) -> Batch {
        let units = self.some_units(percent);
        let groups = self.writes(&units);
        self.batch(groups)
    }

    fn batch(&mut self, groups: Vec<Vec<String>>) -> Batch {
        Batch {
            unmaps: self.random.chance(85),
            cache: self.random.pick(&[
                None,
                None,
                Some("writeback"),
                Some("none"),
                Some("writethrough"),
                Some("unsafe"),
            ]),
            groups,
        }
    }

    fn units(&self) -> u64 {
        self.size_bytes.div_ceil(self.unit_bytes)
    }

    fn fill(&mut self) -> Vec<Vec<String>> {
        let percent = self.random.pick(&[100, 100, 100, 100, 95, 60]);
        let units = self.some_units(percent);
        self.writes(&units)
    }

    /// So many of all units, each in its turn.
    fn some_units(&mut self, percent: u64) -> Vec<u64> {
        let order = match self.random.below(8) {
            0 => Order::Ascending,
            1 => Order::Descending,
            2..5 => Order::Random,
            _ => Order::Streams(self.random.between(2, 8)),
        };
        let mut units = self.ordered(order, 0, self.units());
        if percent < 100 {
            units.retain(|_| self.random.chance(percent));
        }
        units
    }

    fn ordered(&mut self, order: Order, start: u64, end: u64) -> Vec<u64> {
        let mut units: Vec<u64> = (start..end).collect();
        match order {
            Order::Ascending => {}
            Order::Descending => units.reverse(),
            Order::Random => {
                for last in (1..units.len()).rev() {
                    units.swap(last, self.random.below(last as u64 + 1) as usize);
                }
            }
            Order::Streams(streams) => {
                let len = (end - start).div_ceil(streams);
                units.sort_by_key(|unit| ((unit - start) % len, (unit - start) / len));
            }
        }
        units
    }

    fn range(&self, unit: u64) -> (u64, u64) {
        let offset = unit * self.unit_bytes;
        (offset, self.unit_bytes.min(self.size_bytes - offset))
    }

    /// Writes to units, one after the other or several at once.
    fn writes(&mut self, units: &[u64]) -> Vec<Vec<String>> {
        let is_partial = self.random.chance(20);
        let at_once = match self.is_concurrent && self.random.chance(60) {
            true => self.random.between(2, MOST_IN_FLIGHT),
            false => 1,
        };
        let mut groups = Vec::new();
        for units in units.chunks(at_once as usize) {
            let verb = if at_once > 1 { "aio_write" } else { "write" };
            let mut group: Vec<String> = units
                .iter()
                .map(|unit| self.write(verb, *unit, is_partial))
                .collect();
            if at_once > 1 {
                group.push("aio_flush".into());
            }
            groups.push(group);
            if self.random.chance(3) {
                groups.push(vec!["flush".into()]);
            }
        }
        groups
    }

    fn write(&mut self, verb: &str, unit: u64, is_partial: bool) -> String {
        let (mut offset, mut len) = self.range(unit);
        if is_partial && self.random.chance(60) {
            // Still in the same unit, so that requests in flight together stay apart.
            let start = self.random.below(len / 512) * 512;
            offset += start;
            len = (512 * self.random.between(1, 16)).min(len - start);
        }
        format!(
            "{verb} -q -P {} {offset} {len}",
            self.random.between(1, 255)
        )
    }

    /// Frees a part of the disk, then writes as much again, there or anywhere.
    fn churn(&mut self) -> Vec<Vec<String>> {
        let count = self.units();
        let start = self.random.below(count);
        let len = match self.random.chance(30) {
            true => self.random.between(1, 4),
            false => self.random.between(1, count.div_ceil(2)),
        };
        let end = (start + len).min(count);
        let order = self.random.pick(&[
            Order::Ascending,
            Order::Random,
            Order::Random,
            Order::Streams(2),
        ]);
        let mut units = self.ordered(order, start, end);
        let mut groups = self.frees(start, end, &units);
        if self.random.chance(60) {
            groups.push(vec!["flush".into()]);
        }
        if self.random.chance(30) {
            let order = self.random.pick(&[Order::Descending, Order::Random]);
            units = self.ordered(order, 0, count);
        }
        groups.extend(self.writes(&units));
        groups
    }

    /// Discards, or writes of zeroes that unmap: of all at once, or unit by unit.
    fn frees(&mut self, start: u64, end: u64, units: &[u64]) -> Vec<Vec<String>> {
        let zeroes = self.random.chance(35);
        let verb = if zeroes {
            "write -q -z -u"
        } else {
            "discard -q"
        };
        if self.random.chance(50) {
            let offset = start * self.unit_bytes;
            let len = (end * self.unit_bytes).min(self.size_bytes) - offset;
            return vec![vec![format!("{verb} {offset} {len}")]];
        }
        let mut groups = Vec::new();
        for unit in units {
            let (offset, mut len) = self.range(*unit);
            if self.random.chance(5) {
                // Less than a cluster: it stays.
                len = len.min(self.cluster_bytes / 2).max(512);
            }
            groups.push(vec![format!("{verb} {offset} {len}")]);
        }
        groups
    }
}

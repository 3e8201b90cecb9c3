//! What copy-on-write costs an overlay: how much of its clusters differs from the images below,
//! estimated from a random sample of them.
//!
//! Invariants:
//! - The sample is of bounded size, and every cluster with data is in it with the same chance.
//! - The same image gives the same sample.

use std::sync::Arc;

use vellum::{BlockDevice, Buffer, Extent, Result};

/// The smallest piece that guests write: file systems have such blocks.
pub const BLOCK_BYTES: u64 = 4096;
/// Clusters that are compared: enough for a per cent or two.
const SAMPLES: usize = 512;
/// The most that is read for that, from each side.
const MAX_READ_BYTES: u64 = 256 << 20;
const SUBCLUSTERS: u64 = 32;

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Growth {
    /// Clusters that were compared, and all that could have been.
    pub sampled_clusters: u64,
    pub cluster_bytes: u64,
    /// Blocks of 4 KiB that differ from what lies below, and all in the sample.
    pub changed_blocks: u64,
    pub blocks: u64,
    /// Bytes that the sample would take with 32 subclusters a cluster.
    pub subcluster_bytes: u64,
}

impl Growth {
    /// Bytes of clusters for each byte that differs; `None` if nothing does.
    pub fn factor(&self) -> Option<f64> {
        let changed = self.changed_blocks * BLOCK_BYTES.min(self.cluster_bytes);
        let taken = self.sampled_clusters * self.cluster_bytes;
        (changed > 0).then(|| taken as f64 / changed as f64)
    }

    /// The same with subclusters.
    pub fn subcluster_factor(&self) -> Option<f64> {
        let changed = self.changed_blocks * BLOCK_BYTES.min(self.cluster_bytes);
        (changed > 0).then(|| self.subcluster_bytes as f64 / changed as f64)
    }
}

/// Draws clusters that the image itself holds, each with the same chance (algorithm L of
/// reservoir sampling), the same ones each time.
pub struct Sampler {
    cluster_bytes: u64,
    most: usize,
    clusters: Vec<u64>,
    /// Clusters that have gone by, and the number of the next that is drawn.
    seen: u64,
    next: u64,
    weight: f64,
    random: fastrand::Rng,
}

impl Sampler {
    /// A sampler of clusters of this size.
    pub fn new(cluster_bytes: u64) -> Sampler {
        let most = (MAX_READ_BYTES / cluster_bytes).clamp(1, SAMPLES as u64);
        let mut sampler = Sampler {
            cluster_bytes,
            most: most as usize,
            clusters: Vec::new(),
            seen: 0,
            next: 0,
            weight: 1.0,
            random: fastrand::Rng::with_seed(0x5eed),
        };
        sampler.lower_weight();
        sampler
    }

    /// Offers the clusters of an extent.
    pub fn offer(&mut self, start_bytes: u64, extent: &Extent) {
        if extent.depth != 0 || !extent.kind.needs_reading() {
            return;
        }
        let first = start_bytes / self.cluster_bytes;
        let count = extent.len_bytes.div_ceil(self.cluster_bytes);
        let end = self.seen + count;
        while self.next < end {
            let cluster = first + (self.next - self.seen);
            if self.clusters.len() < self.most {
                self.clusters.push(cluster);
                self.next += 1;
                if self.clusters.len() == self.most {
                    self.skip();
                }
            } else {
                let place = (self.chance() * self.most as f64) as usize;
                self.clusters[place.min(self.most - 1)] = cluster;
                self.lower_weight();
                self.next += 1;
                self.skip();
            }
        }
        self.seen = end;
    }

    /// The drawn clusters' numbers, in order, each once.
    pub fn into_clusters(mut self) -> Vec<u64> {
        self.clusters.sort_unstable();
        self.clusters.dedup();
        self.clusters
    }

    fn skip(&mut self) {
        let skipped = self.chance().ln() / (1.0 - self.weight).ln();
        self.next = self.next.saturating_add(skipped as u64);
    }

    fn lower_weight(&mut self) {
        self.weight *= (self.chance().ln() / self.most as f64).exp();
    }

    /// A number above 0 and below 1.
    fn chance(&mut self) -> f64 {
        self.random.f64().max(f64::EPSILON)
    }
}

/// Compares clusters of the image with what lies below.
pub async fn measure(
    device: &Arc<dyn BlockDevice>,
    below: &Arc<dyn BlockDevice>,
    clusters: &[u64],
) -> Result<Option<Growth>> {
    let Some(cluster_bytes) = device.info().cluster_size_bytes else {
        return Ok(None);
    };
    let mut growth = Growth {
        sampled_clusters: 0,
        cluster_bytes,
        changed_blocks: 0,
        blocks: 0,
        subcluster_bytes: 0,
    };
    for cluster in clusters {
        let offset = cluster * cluster_bytes;
        let len = cluster_bytes.min(device.size_bytes().saturating_sub(offset));
        let ours = device.read(offset, Buffer::for_read(len as usize)).await?;
        let theirs = read_below(below, offset, len).await?;
        growth.add(&ours, &theirs);
    }
    Ok((growth.sampled_clusters > 0).then_some(growth))
}

impl Growth {
    fn add(&mut self, ours: &[u8], theirs: &[u8]) {
        let block = BLOCK_BYTES.min(self.cluster_bytes) as usize;
        let changed = ours.chunks(block).zip(theirs.chunks(block));
        let changed: Vec<bool> = changed.map(|(ours, theirs)| ours != theirs).collect();
        self.sampled_clusters += 1;
        self.blocks += changed.len() as u64;
        self.changed_blocks += changed.iter().filter(|changed| **changed).count() as u64;
        let subcluster = (self.cluster_bytes / SUBCLUSTERS).max(block as u64);
        let blocks = (subcluster as usize / block).max(1);
        let touched = changed.chunks(blocks).filter(|part| part.contains(&true));
        self.subcluster_bytes += touched.count() as u64 * subcluster;
    }
}

/// What lies below shows zeroes beyond its end.
async fn read_below(below: &Arc<dyn BlockDevice>, offset: u64, len: u64) -> Result<Buffer> {
    let there = below.size_bytes().saturating_sub(offset).min(len);
    if there == len {
        return below.read(offset, Buffer::for_read(len as usize)).await;
    }
    let mut bytes = vec![0; len as usize];
    if there > 0 {
        let start = below.read(offset, Buffer::for_read(there as usize)).await?;
        bytes[..there as usize].copy_from_slice(&start);
    }
    Ok(Buffer::copy_of(&bytes))
}

#[cfg(test)]
mod tests {
    use vellum::ExtentKind;

    use super::*;

    fn extent(clusters: u64) -> Extent {
        Extent::new(clusters << 16, ExtentKind::Data)
    }

    #[test]
    fn every_cluster_has_the_same_chance() {
        let mut sampler = Sampler::new(1 << 16);
        let mut at = 0;
        for count in [100, 1, 5000, 899, 94_000] {
            sampler.offer(at << 16, &extent(count));
            at += count;
        }
        let drawn = sampler.into_clusters();
        assert_eq!(drawn.len(), SAMPLES, "each is another one");
        let low = drawn.iter().filter(|cluster| **cluster < 50_000).count();
        assert!((200..312).contains(&low), "{low} of 512 in the first half");
        let mut few = Sampler::new(1 << 16);
        few.offer(7 << 16, &extent(3));
        assert_eq!(few.into_clusters(), [7, 8, 9]);
    }

    #[test]
    fn growth_is_what_is_taken_over_what_differs() {
        let mut growth = Growth {
            sampled_clusters: 0,
            cluster_bytes: 1 << 17,
            changed_blocks: 0,
            blocks: 0,
            subcluster_bytes: 0,
        };
        let (mut ours, theirs) = (vec![0; 1 << 17], vec![0; 1 << 17]);
        growth.add(&ours, &theirs);
        assert_eq!(growth.factor(), None);
        ours[5] = 1;
        ours[100_000] = 1;
        growth.add(&ours, &theirs);
        assert_eq!((growth.changed_blocks, growth.blocks), (2, 64));
        assert_eq!(growth.factor(), Some(32.0));
        assert_eq!(growth.subcluster_factor(), Some(1.0));
    }
}

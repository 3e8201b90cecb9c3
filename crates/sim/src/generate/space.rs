//! Scenarios about space: images in places of fixed length and in files with a quota, and guests that
//! fill, discard and write again.

use std::ops::Range;

use crate::disk_room::BLOCK_BYTES;
use crate::rng::Rng;
use crate::scenario::{Backing, ImageOptions, Op, Place, PowerCycle, Scenario, Step};
use crate::space::full_bytes;
use crate::sparse_bytes::SECTOR_BYTES;
use crate::storage::SimFileOptions;

/// Makes the seeds' chances differ from those of other scenarios.
const APART: u64 = 0x0073_7061_6365;

/// Cluster sizes: those at both ends of what tables need more often.
const CLUSTER_BITS: [u32; 10] = [9, 9, 10, 12, 12, 12, 14, 16, 16, 18];

/// The scenario of a seed about space: one cycle, without a crash yet.
pub fn scenario(seed: u64) -> Scenario {
    let mut rng = Rng::new(seed ^ APART);
    let image = image(&mut rng);
    let cycles = vec![cycle(&image, &mut rng)];
    Scenario {
        image,
        setup: Vec::new(),
        preparations: Vec::new(),
        cycles,
    }
}

/// One more cycle for a scenario about space.
pub fn cycle(image: &ImageOptions, rng: &mut Rng) -> PowerCycle {
    let mut guest = SpaceGuest::new(image, rng);
    guest.steps.push(Step::InFlight(rng.between(1, 8)));
    match rng.below(8) {
        0 | 1 => guest.fill(rng),
        2..=4 => guest.refill(rng),
        5 | 6 => guest.churn(rng),
        _ => {
            guest.fill(rng);
            guest.churn(rng);
        }
    }
    guest.flush_quietly();
    if matches!(image.place, Place::Quota { .. }) {
        guest.change_quota(full_bytes(image).div_ceil(BLOCK_BYTES), rng);
    }
    PowerCycle {
        steps: guest.steps,
        schedule_seed: rng.next_u64(),
        crash: None,
    }
}

fn image(rng: &mut Rng) -> ImageOptions {
    let cluster_bits = *rng.pick(&CLUSTER_BITS);
    let cluster = 1 << cluster_bits;
    let version = if rng.chance(1, 8) { 2 } else { 3 };
    let clusters = match cluster_bits {
        ..=10 => rng.between(40, 400),
        11..=12 => rng.between(30, 250),
        13..=14 => rng.between(20, 150),
        15..=16 => rng.between(16, 100),
        _ => rng.between(8, 24),
    };
    let cut_off = match rng.chance(1, 4) {
        true => rng.below(cluster / SECTOR_BYTES) * SECTOR_BYTES,
        false => 0,
    };
    let size_bytes = clusters * cluster - cut_off;
    let mut image = ImageOptions {
        version,
        refcount_order: match version {
            2 => 4,
            _ => *rng.pick(&[0, 1, 3, 4, 4, 4, 5, 6]),
        },
        extended_l2: version == 3 && cluster_bits >= 14 && rng.chance(1, 2),
        lazy_refcounts: version == 3 && rng.chance(1, 6),
        backing: match version == 3 && rng.chance(1, 6) {
            true => Backing::Raw(size_bytes.min(256 << 10)),
            false => Backing::None,
        },
        encrypted: rng.chance(1, 24),
        data_cache: rng.chance(1, 2),
        tiny_cache: rng.chance(1, 3),
        eager: rng.chance(1, 2),
        discard_no_unref: version == 3 && rng.chance(1, 16),
        ..ImageOptions::plain(size_bytes, cluster_bits)
    };
    image.place = place(&image, rng);
    // A dirty image is repaired by new refcounts, for which a full place has no room.
    image.lazy_refcounts &= image.place == Place::Growable;
    image.traits = SimFileOptions {
        can_punch: rng.chance(3, 4) || matches!(image.place, Place::Quota { .. }),
        can_zero: rng.chance(3, 4),
        growable: !matches!(image.place, Place::Fixed { .. }),
        ..SimFileOptions::default()
    };
    image
}

fn place(image: &ImageOptions, rng: &mut Rng) -> Place {
    let full = full_bytes(image);
    let cluster = 1 << image.cluster_bits;
    let slack = match rng.below(4) {
        0 | 1 => 0,
        2 => rng.between(1, 4) * cluster,
        _ => full / 10,
    };
    match rng.below(8) {
        0..=3 => Place::Fixed {
            len_bytes: full + slack,
        },
        4 => {
            let len_bytes = full * rng.between(50, 95) / 100;
            // The metadata that every image has must fit.
            let least = full - image.size_bytes / 2;
            Place::Fixed {
                len_bytes: len_bytes.max(least).min(full) / SECTOR_BYTES * SECTOR_BYTES,
            }
        }
        5 | 6 => Place::Quota {
            blocks: (full + slack).div_ceil(BLOCK_BYTES),
        },
        _ => Place::Growable,
    }
}

/// A guest that is made up step by step.
struct SpaceGuest {
    steps: Vec<Step>,
    cluster: u64,
    clusters: u64,
    size_bytes: u64,
    /// Writes may be shorter than a cluster.
    partial: bool,
    may_reopen: bool,
}

impl SpaceGuest {
    fn new(image: &ImageOptions, rng: &mut Rng) -> SpaceGuest {
        let cluster = 1 << image.cluster_bits;
        let full = full_bytes(image);
        SpaceGuest {
            steps: Vec::new(),
            cluster,
            clusters: image.size_bytes.div_ceil(cluster),
            size_bytes: image.size_bytes,
            partial: image.cluster_bits > 12 || rng.chance(1, 4),
            // Where acknowledged writes may find no room a close may fail.
            may_reopen: match image.place {
                Place::Fixed { len_bytes } => len_bytes >= full,
                _ => true,
            } && rng.chance(1, 4),
        }
    }

    /// A write that needs all of a cluster, or a few of them.
    fn write(&mut self, guest: u64, rng: &mut Rng) {
        let start = guest * self.cluster;
        let end = (start + self.cluster).min(self.size_bytes);
        let (mut offset, mut len) = (start, end - start);
        if self.cluster > 64 << 10 || self.partial && rng.chance(3, 4) {
            let sectors = len / SECTOR_BYTES;
            let at = rng.below(sectors);
            offset += at * SECTOR_BYTES;
            len = rng.between(1, (sectors - at).min(8)) * SECTOR_BYTES;
        }
        let fua = rng.chance(1, 64);
        self.start(Op::Write { offset, len, fua });
    }

    fn start(&mut self, op: Op) {
        self.steps.push(Step::Start(op));
    }

    /// Frees whole clusters in one way or another.
    fn free(&mut self, guests: Range<u64>, rng: &mut Rng) {
        let offset = guests.start * self.cluster;
        let len = (guests.end * self.cluster).min(self.size_bytes) - offset;
        self.start(match rng.chance(1, 4) {
            true => Op::WriteZeroes {
                offset,
                len,
                unmap: true,
                fua: false,
            },
            false => Op::Discard { offset, len },
        });
    }

    /// Some guest clusters in a row.
    fn part(&self, rng: &mut Rng) -> Range<u64> {
        let count = rng.between(1, (self.clusters / 2).max(1));
        let first = rng.below(self.clusters - count + 1);
        first..first + count
    }

    fn flush_quietly(&mut self) {
        self.steps
            .extend([Step::Wait, Step::Start(Op::Flush), Step::Wait]);
    }

    fn rest(&mut self, rng: &mut Rng) {
        match rng.below(6) {
            0 => self.steps.push(Step::Wait),
            1 => self.start(Op::Flush),
            2 | 3 => self.flush_quietly(),
            4 if self.may_reopen => self.steps.push(Step::Reopen),
            _ => {}
        }
    }

    /// Writes some clusters once, in random order.
    fn write_shuffled(&mut self, guests: Range<u64>, rng: &mut Rng) {
        let mut order: Vec<u64> = guests.collect();
        for at in (1..order.len()).rev() {
            order.swap(at, rng.below(at as u64 + 1) as usize);
        }
        let flushes = rng.chance(1, 3);
        for guest in order {
            self.write(guest, rng);
            if flushes && rng.chance(1, 16) {
                self.start(Op::Flush);
            }
        }
    }

    /// Writes every cluster once, as sequential writers side by side do, each in its part of the disk.
    fn write_side_by_side(&mut self, rng: &mut Rng) {
        let writers = rng.between(2, 4);
        let part = self.clusters.div_ceil(writers);
        let parts = (0..self.clusters).step_by(part as usize);
        let mut parts: Vec<Range<u64>> = parts
            .map(|start| start..(start + part).min(self.clusters))
            .collect();
        while !parts.is_empty() {
            let writer = rng.below(parts.len() as u64) as usize;
            match parts[writer].next() {
                Some(guest) => self.write(guest, rng),
                None => drop(parts.swap_remove(writer)),
            }
        }
    }

    /// Writes every cluster once.
    fn fill(&mut self, rng: &mut Rng) {
        match rng.below(5) {
            0 => {
                for guest in 0..self.clusters {
                    self.write(guest, rng);
                }
            }
            1 => self.write_side_by_side(rng),
            _ => self.write_shuffled(0..self.clusters, rng),
        }
        self.rest(rng);
    }

    /// Fills the disk, and frees parts of it and writes them again, without closing the image.
    fn refill(&mut self, rng: &mut Rng) {
        self.fill(rng);
        for _ in 0..rng.between(1, 5) {
            let part = self.part(rng);
            self.free(part.clone(), rng);
            self.rest(rng);
            // Elsewhere what is freed by then is needed.
            if rng.chance(1, 4) {
                let elsewhere = self.part(rng);
                self.free(elsewhere.clone(), rng);
                self.write_shuffled(elsewhere, rng);
            }
            self.write_shuffled(part, rng);
            self.rest(rng);
        }
    }

    /// Writes and frees clusters in any order.
    fn churn(&mut self, rng: &mut Rng) {
        let most_freed = rng.between(1, 8).min(self.clusters);
        for _ in 0..rng.between(50, 400) {
            match rng.below(16) {
                0..=8 => {
                    let guest = rng.below(self.clusters);
                    self.write(guest, rng);
                }
                9..=12 => {
                    let count = rng.between(1, most_freed);
                    let first = rng.below(self.clusters - count + 1);
                    self.free(first..first + count, rng);
                }
                13 => {
                    let part = rng.below(self.clusters) * self.cluster;
                    self.start(Op::WriteZeroes {
                        offset: part,
                        len: self.cluster.min(self.size_bytes - part),
                        unmap: false,
                        fua: false,
                    });
                }
                14 => self.start(Op::Flush),
                _ => self.steps.push(Step::Wait),
            }
        }
        self.rest(rng);
    }

    /// Has the quota change between the steps; at the end there is as much as at first.
    fn change_quota(&mut self, full_blocks: u64, rng: &mut Rng) {
        if rng.chance(1, 3) {
            return;
        }
        for _ in 0..rng.between(1, 6) {
            let at = rng.between(1, self.steps.len() as u64) as usize;
            let blocks = match rng.chance(1, 3) {
                true => full_blocks,
                false => full_blocks * rng.between(10, 130) / 100,
            };
            self.steps.insert(at, Step::SetQuota { blocks });
        }
        self.steps.push(Step::SetQuota {
            blocks: full_blocks,
        });
        self.flush_quietly();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_lie_inside_the_disk() {
        for seed in 0..500 {
            let scenario = scenario(seed);
            for step in &scenario.cycles[0].steps {
                if let Step::Start(op) = step {
                    let (offset, len) = op.range();
                    assert!(offset + len <= scenario.image.size_bytes, "{seed}: {op:?}");
                    assert!(len > 0 || *op == Op::Flush, "{seed}: {op:?}");
                }
            }
        }
    }

    #[test]
    fn every_kind_of_place_comes_up() {
        let scenarios: Vec<Scenario> = (0..300).map(scenario).collect();
        let has = |test: &dyn Fn(&Scenario) -> bool| scenarios.iter().any(test);
        let full = |scenario: &Scenario| full_bytes(&scenario.image);
        assert!(has(&|one| one.image.place
            == Place::Fixed {
                len_bytes: full(one)
            }));
        assert!(has(
            &|one| matches!(one.image.place, Place::Fixed { len_bytes } if len_bytes < full(one))
        ));
        assert!(has(&|one| matches!(one.image.place, Place::Quota { .. })));
        assert!(has(&|one| one.image.place == Place::Growable));
        assert!(has(&|one| one.image.encrypted) && has(&|one| one.image.lazy_refcounts));
        let sets = |step: &Step| matches!(step, Step::SetQuota { .. });
        assert!(has(&|one| one.cycles[0].steps.iter().any(sets)));
    }
}

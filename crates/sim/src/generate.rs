//! Makes scenarios out of seeds.

mod compaction;
mod kill;
mod snapshots;
pub mod space;

use vellum::Preallocation;

pub use kill::after_kill;

use crate::rng::Rng;
use crate::scenario::{
    Amendment, Backing, BitmapChange, Damage, DataFile, FaultRates, ImageOptions, Op, Place,
    PowerCycle, Preparation, Scenario, Step, WriteLog,
};
use crate::sparse_bytes::SECTOR_BYTES;
use crate::storage::SimFileOptions;

/// Requests are at most this long, so that a seed takes milliseconds.
const MAX_REQUEST_BYTES: u64 = 64 << 10;

/// Larger devices teach nothing that smaller ones do not.
const MAX_RESIZE_BYTES: u64 = 4 << 20;

/// Cluster sizes: the small ones more often, for they put more events into less
/// time, and the largest seldom, for every start reads tables as large as they are.
const CLUSTER_BITS: [(u32, u64); 13] = [
    (9, 24),
    (10, 12),
    (11, 10),
    (12, 18),
    (13, 6),
    (14, 9),
    (15, 4),
    (16, 9),
    (17, 2),
    (18, 1),
    (19, 1),
    (20, 1),
    (21, 1),
];

/// The scenario of a seed: one cycle, without a crash yet.
pub fn scenario(seed: u64) -> Scenario {
    let mut rng = Rng::new(seed);
    let image = image(&mut rng);
    finish(seed, image, rng)
}

/// The scenario of a seed with an image that has checksums; `None` where it cannot have any.
pub fn scenario_with_checksums(seed: u64) -> Option<Scenario> {
    let mut rng = Rng::new(seed);
    let mut image = image(&mut rng);
    image.checksums = image.can_have_checksums();
    image.checksums.then(|| finish(seed, image, rng))
}

fn finish(seed: u64, image: ImageOptions, mut rng: Rng) -> Scenario {
    let mut scenario = scenario_of(image, &mut rng);
    sometimes_fail(&mut scenario, seed);
    let mut other = Rng::new(seed ^ 0x7772_6974_6573);
    if scenario.image.write_log != WriteLog::None && other.chance(1, 2) {
        let size_bytes = scenario.image.size_bytes;
        for cycle in &mut scenario.cycles {
            rewrite_sectors(cycle, size_bytes, &mut other);
        }
    }
    compaction::sometimes(&mut scenario, seed);
    scenario
}

/// Has requests on the disk fail in one scenario of four.
pub(crate) fn sometimes_fail(scenario: &mut Scenario, seed: u64) {
    // By chance of its own, so that all other scenarios are what they were.
    let mut other = Rng::new(seed ^ 0x6661_756c_7473);
    if other.chance(1, 4) {
        scenario
            .cycles
            .iter_mut()
            .for_each(|cycle| fail(cycle, &mut other));
    }
}

/// Has short writes to the same sectors run side by side, again and again, each time read back and
/// flushed: in which order a write log has them shows.
fn rewrite_sectors(cycle: &mut PowerCycle, size_bytes: u64, rng: &mut Rng) {
    let resizes = |step: &Step| matches!(step, Step::Resize { .. });
    let before = cycle.steps.iter().position(resizes);
    let places = before.unwrap_or(cycle.steps.len()) as u64;
    let mut at = rng.below(places + 1) as usize;
    let sectors = rng.between(1, 8).min(size_bytes / SECTOR_BYTES);
    let first = rng.below(size_bytes / SECTOR_BYTES - sectors + 1) * SECTOR_BYTES;
    let end = first + sectors * SECTOR_BYTES;
    // Parts of sectors are read again for the log, which takes a while.
    let grain = *rng.pick(&[SECTOR_BYTES, SECTOR_BYTES, 100]);
    let mut steps = Vec::new();
    for _ in 0..*rng.pick(&[2, 4, 6, 16]) {
        if rng.chance(2, 3) {
            // Where nothing is to be committed no log is used; this may allocate something.
            steps.push(Step::Start(Op::Write {
                offset: rng.below(size_bytes / SECTOR_BYTES) * SECTOR_BYTES,
                len: SECTOR_BYTES,
                fua: false,
            }));
        }
        for _ in 0..rng.between(2, 4) {
            let offset = first + rng.below((end - first).div_ceil(grain)) * grain;
            let len = rng.between(1, 4) * grain;
            steps.push(Step::Start(Op::Write {
                offset,
                len: len.min(end - offset),
                fua: rng.chance(1, 8),
            }));
        }
        steps.extend([
            Step::Wait,
            Step::Start(Op::Read {
                offset: first,
                len: end - first,
            }),
            Step::Wait,
            Step::Start(Op::Flush),
        ]);
        if rng.chance(1, 2) {
            steps.push(Step::Wait);
        }
    }
    for step in steps {
        cycle.steps.insert(at, step);
        at += 1;
    }
}

/// Makes the disk of a cycle fail. What opens the image in other ways is left out.
pub fn fail(cycle: &mut PowerCycle, rng: &mut Rng) {
    cycle.steps.retain(|step| {
        !matches!(
            step,
            Step::Commit
                | Step::Flatten { .. }
                | Step::Amend(_)
                | Step::Repair(_)
                | Step::ChangeKeys
        )
    });
    let mut seldom = |most: u64| match rng.chance(1, 3) {
        true => 0,
        false => rng.between(2, most),
    };
    let (requests, flushes) = (seldom(200), seldom(12));
    let odds = FaultRates {
        requests,
        flushes,
        forgets: rng.chance(1, 2),
    };
    let seed = rng.next_u64();
    let at = rng.below(cycle.steps.len() as u64 / 2 + 1) as usize;
    cycle.steps.insert(at, Step::Fail { seed, odds });
    // More of what counts.
    for _ in 0..rng.between(1, 6) {
        let at = rng.between(at as u64 + 1, cycle.steps.len() as u64) as usize;
        let step = match rng.below(3) {
            0 => Step::Reopen,
            1 => Step::Wait,
            _ => Step::Start(Op::Flush),
        };
        cycle.steps.insert(at, step);
    }
}

/// A scenario on an image with these options.
pub fn scenario_of(image: ImageOptions, rng: &mut Rng) -> Scenario {
    let places = GuestRegions::new(&image, rng);
    let setup_ops = if rng.chance(1, 4) {
        0
    } else {
        rng.between(1, 12)
    };
    let setup = (0..setup_ops).map(|_| places.setup_op(rng)).collect();
    let preparations = preparations(&image, rng);
    let cycles = vec![cycle_of(&places, rng)];
    Scenario {
        image,
        setup,
        preparations,
        cycles,
    }
}

/// One more cycle for a scenario.
pub fn cycle(image: &ImageOptions, rng: &mut Rng) -> PowerCycle {
    cycle_of(&GuestRegions::new(image, rng), rng)
}

fn image(rng: &mut Rng) -> ImageOptions {
    let cluster_bits = cluster_bits(rng);
    let cluster = 1 << cluster_bits;
    let version = if rng.chance(1, 5) { 2 } else { 3 };
    let extended_l2 = version == 3 && cluster_bits >= 14 && rng.chance(1, 2);
    let refcount_order = if version == 2 {
        4
    } else {
        *rng.pick(&[0, 1, 2, 3, 4, 4, 4, 5, 6])
    };
    let clusters = match cluster_bits {
        ..=9 => rng.between(8, 200),
        10..=12 => rng.between(6, 60),
        13..=16 => rng.between(3, 16),
        _ => rng.between(2, 5),
    };
    // Not every disk ends at a cluster's end.
    let cut_off = match rng.chance(1, 3) {
        true => rng.below(cluster / SECTOR_BYTES) * SECTOR_BYTES,
        false => 0,
    };
    let size_bytes = clusters * cluster - cut_off;
    // The names of other files do not fit into the header cluster of the smallest kind.
    let names_fit = version == 3 && cluster_bits > 9;
    let data_file = match rng.below(10) {
        0 if names_fit => DataFile::External,
        1 if names_fit => DataFile::ExternalRaw,
        _ => DataFile::Inside,
    };
    let backing = match data_file {
        DataFile::ExternalRaw => Backing::None,
        _ => backing(size_bytes, rng),
    };
    let traits = SimFileOptions {
        can_punch: rng.chance(3, 4),
        can_zero: rng.chance(3, 4),
        growable: !rng.chance(1, 8),
        read_only: false,
        can_clone: rng.chance(1, 3),
    };
    // Few: a LUKS header takes half a megabyte, and some time to unlock after each cut.
    let encrypted = data_file != DataFile::ExternalRaw && rng.chance(1, 64);
    // Of small granularity, so that a bit set too late or too little shows.
    let bitmap_bits = (version == 3 && rng.chance(1, 4))
        .then(|| rng.between(9, u64::from(cluster_bits.max(12))) as u32);
    // The header has room for what names the log. Drawn so that nothing else depends on it.
    let min_bits = 12 + 2 * u32::from(data_file != DataFile::Inside);
    let log_fits = version == 3 && cluster_bits >= min_bits;
    let mut place = Rng::new(rng.clone().below(u64::MAX) ^ 0x696e_7369_6465);
    let write_log = write_log(log_fits, traits.growable, rng, &mut place);
    let mut other = Rng::new(rng.clone().below(u64::MAX) ^ 0x7375_6d73);
    let checksums = log_fits && data_file == DataFile::Inside && other.chance(1, 4);
    ImageOptions {
        version,
        cluster_bits,
        refcount_order,
        extended_l2,
        lazy_refcounts: version == 3 && rng.chance(1, 5),
        size_bytes,
        backing,
        data_file,
        encrypted,
        write_log,
        checksums,
        data_cache: !place.chance(1, 8),
        tiny_cache: rng.chance(1, 2),
        eager: rng.chance(3, 4),
        discard_no_unref: version == 3 && rng.chance(1, 6),
        requests_only: false,
        bitmap_bits,
        traits,
        place: Place::Unchecked,
    }
}

fn write_log(fits: bool, growable: bool, rng: &Rng, place: &mut Rng) -> WriteLog {
    match fits && rng.clone().chance(1, 3) {
        true if growable && place.chance(1, 3) => WriteLog::Inside,
        true => WriteLog::File,
        false => WriteLog::None,
    }
}

fn cluster_bits(rng: &mut Rng) -> u32 {
    let mut place = rng.below(CLUSTER_BITS.iter().map(|(_, weight)| weight).sum());
    for (bits, weight) in CLUSTER_BITS {
        if place < weight {
            return bits;
        }
        place -= weight;
    }
    16
}

fn backing(size_bytes: u64, rng: &mut Rng) -> Backing {
    let sectors = size_bytes / SECTOR_BYTES;
    let below = match rng.below(3) {
        0 => sectors,
        1 => rng.between(1, sectors),
        _ => sectors + rng.below(64),
    } * SECTOR_BYTES;
    // A large backing file costs more time than it can teach.
    let below = below.min(256 << 10);
    match rng.below(4) {
        0 => Backing::Raw(below),
        1 => Backing::Qcow2 {
            size_bytes: below,
            cluster_bits: rng.between(9, 12) as u32,
        },
        _ => Backing::None,
    }
}

fn preparations(image: &ImageOptions, rng: &mut Rng) -> Vec<Preparation> {
    let mut preparations = Vec::new();
    if image.version == 3 && image.data_file == DataFile::Inside && rng.chance(1, 5) {
        preparations.push(Preparation::ZeroFlags(rng.between(1, 4)));
    }
    let inside = image.data_file == DataFile::Inside && image.traits.growable;
    if inside && image.refcount_order >= 3 && image.cluster_bits <= 16 && rng.chance(1, 5) {
        preparations.push(Preparation::Compress(rng.between(1, 4)));
    }
    if inside && image.refcount_order >= 3 && rng.chance(1, 3) {
        preparations.push(Preparation::Snapshot);
    }
    if inside && image.version == 3 && rng.chance(1, 16) {
        preparations.push(Preparation::Dirty(rng.below(4)));
    }
    let small_table = image.cluster_bits == 9 && image.refcount_order >= 5;
    if small_table && image.traits.growable && rng.chance(3, 4) {
        preparations.push(Preparation::FullTable(rng.below(4)));
    }
    preparations
}

/// Where the guest works: a few windows of a few clusters, so that requests meet.
struct GuestRegions {
    windows: Vec<(u64, u64)>,
    cluster: u64,
    subcluster: u64,
    size_bytes: u64,
    requests_only: bool,
    /// There is a backing file, and space below for what is committed.
    has_backing: bool,
    compressible: bool,
    snapshots: bool,
    has_bitmap: bool,
    /// Version 2 will do.
    may_be_old: bool,
    /// It has passphrases.
    encrypted: bool,
}

impl GuestRegions {
    fn new(image: &ImageOptions, rng: &mut Rng) -> Self {
        let cluster = 1 << image.cluster_bits;
        let clusters = image.size_bytes.div_ceil(cluster);
        let windows = (0..rng.between(1, 3)).map(|_| {
            let first = rng.below(clusters);
            let count = rng.between(1, 6);
            (
                first * cluster,
                ((first + count) * cluster).min(image.size_bytes),
            )
        });
        let subcluster = if image.extended_l2 {
            cluster / 32
        } else {
            cluster
        };
        GuestRegions {
            windows: windows.collect(),
            cluster,
            subcluster,
            size_bytes: image.size_bytes,
            requests_only: image.requests_only,
            has_backing: image.backing != Backing::None && !image.requests_only,
            compressible: image.data_file == DataFile::Inside
                && !image.encrypted
                && !image.requests_only,
            snapshots: image.data_file == DataFile::Inside && !image.requests_only,
            has_bitmap: image.bitmap_bits.is_some() && image.traits.growable,
            may_be_old: !image.discard_no_unref && image.bitmap_bits.is_none(),
            encrypted: image.encrypted && !image.requests_only,
        }
    }

    fn amendment(&self, rng: &mut Rng) -> Amendment {
        let mut amendment = Amendment::default();
        let version = rng.between(2, 3) as u32;
        match rng.below(8) {
            0..=3 if version == 3 || self.may_be_old => amendment.version = Some(version),
            0..=5 => amendment.refcount_order = Some(rng.below(7) as u32),
            6 => amendment.lazy_refcounts = Some(rng.chance(1, 2)),
            _ => {
                amendment.data_file_name_len = Some(*rng.pick(&[0, 3, 300, 600, 1000]));
                amendment.not_raw = rng.chance(1, 2);
            }
        }
        if amendment.version == Some(2) {
            amendment.refcount_order = Some(4);
        }
        amendment
    }

    /// A byte range inside a window: (offset, length), never empty.
    fn range(&self, rng: &mut Rng) -> (u64, u64) {
        let (start, end) = *rng.pick(&self.windows);
        let grain = match rng.below(8) {
            0..=2 => self.cluster,
            3..=4 => self.subcluster,
            5..=6 => SECTOR_BYTES,
            _ => 1,
        };
        let offset = start + rng.below((end - start).div_ceil(grain)) * grain;
        let grains = if rng.chance(1, 3) {
            rng.between(1, 4)
        } else {
            1
        };
        let mut len = grains * grain;
        if grain == SECTOR_BYTES {
            len *= rng.between(1, 8);
        } else if grain == 1 {
            len = rng.between(1, 1500);
        }
        let most = if rng.chance(1, 16) {
            self.cluster
        } else {
            MAX_REQUEST_BYTES
        };
        (offset, len.min(end - offset).min(most))
    }

    /// A compressed write of the clusters that a range touches.
    fn compressed(&self, (offset, len): (u64, u64), fua: bool) -> Op {
        let start = offset / self.cluster * self.cluster;
        let end = (offset + len).next_multiple_of(self.cluster);
        Op::WriteCompressed {
            offset: start,
            len: end.min(self.size_bytes) - start,
            fua,
        }
    }

    fn setup_op(&self, rng: &mut Rng) -> Op {
        let (offset, len) = self.range(rng);
        if self.compressible && rng.chance(1, 5) {
            return self.compressed((offset, len), false);
        }
        match rng.below(8) {
            0 => Op::WriteZeroes {
                offset,
                len,
                unmap: rng.chance(1, 2),
                fua: false,
            },
            1 => Op::Discard { offset, len },
            _ => Op::Write {
                offset,
                len,
                fua: false,
            },
        }
    }

    /// A resize to anything from nearly nothing to twice the first size and a bit, so
    /// that small clusters need another L1 table.
    fn resize(&self, rng: &mut Rng) -> Step {
        let most = (2 * self.size_bytes + 8 * self.cluster).min(MAX_RESIZE_BYTES);
        let grain = *rng.pick(&[SECTOR_BYTES, self.cluster, self.cluster]);
        let preallocation = match rng.below(6) {
            0 => Preallocation::Metadata,
            1 => Preallocation::Falloc,
            2 => Preallocation::Full,
            _ => Preallocation::Off,
        };
        let size_bytes = (1 + rng.below(most / grain)) * grain;
        Step::Resize {
            size_bytes,
            preallocation,
        }
    }

    fn op(&self, rng: &mut Rng) -> Op {
        let (offset, len) = self.range(rng);
        let fua = rng.chance(1, 16);
        if self.compressible && rng.chance(1, 6) {
            return self.compressed((offset, len), fua);
        }
        match rng.below(20) {
            0..=9 => Op::Write { offset, len, fua },
            10..=12 => Op::WriteZeroes {
                offset,
                len,
                unmap: rng.chance(1, 2),
                fua,
            },
            13..=15 => Op::Discard { offset, len },
            16 => Op::Read { offset, len },
            _ => Op::Flush,
        }
    }
}

fn bitmap_change(rng: &mut Rng) -> BitmapChange {
    *rng.pick(&[
        BitmapChange::Clear,
        BitmapChange::Disable,
        BitmapChange::Enable,
        BitmapChange::Enable,
        BitmapChange::Second,
    ])
}

fn cycle_of(places: &GuestRegions, rng: &mut Rng) -> PowerCycle {
    let count = if rng.chance(1, 8) {
        rng.between(20, 40)
    } else {
        rng.between(2, 20)
    };
    // How seldom the guest waits decides how much runs at once.
    let patience = *rng.pick(&[1, 2, 4, 16]);
    let resizes = !places.requests_only && rng.chance(1, 4);
    let jobs = places.has_backing && rng.chance(1, 2);
    let repairs = !places.requests_only && rng.chance(1, 8);
    let bitmaps = places.has_bitmap && rng.chance(1, 2);
    let amends = !places.requests_only && rng.chance(1, 5);
    let mut steps = Vec::new();
    let mut resized = false;
    for _ in 0..count {
        let mut op = places.op(rng);
        if resized && rng.chance(1, 4) {
            op.shift(places.size_bytes.next_multiple_of(places.cluster));
        }
        steps.push(Step::Start(op));
        if rng.chance(1, patience) {
            steps.push(Step::Wait);
        }
        if rng.chance(1, 24) {
            steps.push(Step::Reopen);
        }
        if jobs && rng.chance(1, 8) {
            let all_but_flat = rng.chance(3, 4);
            steps.push(if all_but_flat {
                Step::Commit
            } else {
                let compress = places.compressible && rng.chance(1, 2);
                Step::Flatten { compress }
            });
        }
        if repairs && rng.chance(1, 8) {
            steps.push(Step::Repair(damage(rng)));
        }
        if bitmaps && rng.chance(1, 6) {
            steps.push(Step::Bitmap(bitmap_change(rng)));
        }
        if amends && rng.chance(1, 6) {
            steps.push(Step::Amend(places.amendment(rng)));
        }
        if resizes && rng.chance(1, 4) {
            steps.push(places.resize(rng));
            resized = true;
        }
    }
    let schedule_seed = rng.next_u64();
    let mut other = Rng::new(!schedule_seed);
    if places.snapshots && other.chance(1, 3) {
        snapshots::change_snapshots(&mut steps, &mut other);
    }
    if places.encrypted && rng.chance(1, 3) {
        let at = rng.below(steps.len() as u64 + 1) as usize;
        steps.insert(at, Step::ChangeKeys);
    }
    PowerCycle {
        steps,
        schedule_seed,
        crash: None,
    }
}

fn damage(rng: &mut Rng) -> Damage {
    match rng.below(8) {
        0 | 1 => Damage::CountsLost(rng.between(1, 6)),
        2 => Damage::CountsHigh(rng.between(1, 6)),
        3 => Damage::BlockLost(rng.below(3)),
        4 => Damage::BlockUnaligned(rng.below(3)),
        5 => Damage::BlockTwice,
        6 => Damage::Flags(rng.between(1, 6)),
        _ => Damage::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_lie_inside_the_device() {
        for seed in 0..2000 {
            let scenario = scenario(seed);
            let steps = scenario.cycles[0]
                .steps
                .iter()
                .filter_map(|step| match step {
                    Step::Start(op) => Some(*op),
                    _ => None,
                });
            let resized = |step: &Step| matches!(step, Step::Resize { .. });
            if scenario.cycles[0].steps.iter().any(resized) {
                continue;
            }
            for op in scenario.setup.iter().copied().chain(steps) {
                let (offset, len) = op.range();
                assert!(
                    offset + len <= scenario.image.size_bytes,
                    "seed {seed}: {op:?}"
                );
                assert!(len > 0 || op == Op::Flush, "seed {seed}: {op:?}");
            }
        }
    }

    #[test]
    fn every_kind_of_image_comes_up() {
        let scenarios: Vec<Scenario> = (0..3000).map(scenario).collect();
        let has = |test: &dyn Fn(&ImageOptions) -> bool| scenarios.iter().any(|s| test(&s.image));
        for (bits, _) in CLUSTER_BITS {
            assert!(has(&|image| image.cluster_bits == bits));
        }
        for order in 0..=6 {
            assert!(has(&|image| image.refcount_order == order));
        }
        assert!(has(&|image| image.version == 2) && has(&|image| image.extended_l2));
        assert!(has(&|image| image.data_file == DataFile::External));
        assert!(has(&|image| image.data_file == DataFile::ExternalRaw));
        assert!(has(
            &|image| matches!(image.backing, Backing::Raw(len) if len < image.size_bytes)
        ));
        assert!(has(&|image| matches!(image.backing, Backing::Qcow2 { .. })));
        assert!(has(&|image| !image.traits.growable));
        assert!(has(&|image| image.bitmap_bits.is_some()));
        assert!(scenarios.iter().any(|s| s.preparations.len() == 3));
        let in_data_file = |image: &ImageOptions| {
            image.bitmap_bits.is_some() && image.data_file != DataFile::Inside
        };
        assert!(has(&in_data_file));
    }

    /// Changes of different kinds meet in one scenario, with a disk that fails and with one that
    /// does not.
    #[test]
    fn changes_of_every_kind_meet() {
        let scenarios: Vec<Scenario> = (0..10_000).map(scenario).collect();
        for failing in [false, true] {
            let meet = scenarios.iter().filter(|scenario| {
                let steps = &scenario.cycles[0].steps;
                let any = |test: &dyn Fn(&Step) -> bool| steps.iter().any(test);
                any(&|step| matches!(step, Step::Resize { .. }))
                    && any(&|step| matches!(step, Step::Snapshot(_)))
                    && any(&|step| matches!(step, Step::Bitmap(_)))
                    && any(&|step| matches!(step, Step::Fail { .. })) == failing
            });
            let count = meet.count();
            assert!(count >= 3, "failing: {failing}, {count}");
        }
    }
}

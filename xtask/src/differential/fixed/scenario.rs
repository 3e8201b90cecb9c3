//! A scenario: an image in a place of some length, and what is done to it.

use super::super::shrink::{Shrinks, halves};
use super::jobs::{Job, Kind};
use super::load::{Batch, Load};
use super::options::Options;
use crate::random::Random;

/// Groups of commands are made smaller themselves once there are so many at most.
const FEW_GROUPS: usize = 8;

/// One scenario in so many is about a job of a daemon.
const ONE_JOB_IN: u64 = 10;
/// One fill in so many is compared by how far it reaches.
const ONE_AMPLE_IN: u64 = 8;

/// How long the place is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// The fully allocated size that `measure` reports.
    Full,
    /// So many bytes more.
    Slack(u64),
    /// The required size, with that of the bitmaps where they are copied.
    Required,
    /// Four times the fully allocated size: what is allocated must be compact all the same.
    Ample,
    /// So many thousandths of the fully allocated size.
    Part(u64),
}

/// What is done.
#[derive(Debug, Clone)]
pub enum Script {
    /// Runs of `qemu-io`.
    Io(Vec<Batch>),
    /// `convert` into the place.
    Convert(Convert),
    /// `commit` into the place.
    Commit {
        /// What the image in the place holds before.
        base: Batch,
        /// What its overlay holds.
        overlay: Batch,
        /// Leave the overlay as it is (`-d`).
        keeps_overlay: bool,
    },
    /// `rebase` of an image in the place.
    Rebase {
        /// What its backing file holds.
        base: Batch,
        /// What the image holds.
        overlay: Batch,
        /// To no backing file, or to another one that is empty.
        alone: bool,
    },
    /// A job of a daemon.
    Job(Job),
}

/// How the source of a conversion is made, and how it is converted.
#[derive(Debug, Clone)]
pub struct Convert {
    /// Cluster size of the source, as a power of two.
    pub source_bits: u32,
    /// What the source holds.
    pub source: Batch,
    /// Persistent bitmaps: options of `bitmap --add`, before the source is written.
    pub bitmaps: Vec<Vec<String>>,
    /// Options of `convert`.
    pub words: Vec<String>,
    /// Into an image that was created before (`-n`).
    pub into_existing: bool,
}

/// An image, its place, and what is done to it.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// How the image is created.
    pub options: Options,
    /// Virtual size in bytes.
    pub size_bytes: u64,
    /// Length of the place.
    pub room: Room,
    /// The image of the program under test is created by QEMU's.
    pub is_created_by_qemu: bool,
    /// A backing file behind it, with what it holds.
    pub backing: Option<Batch>,
    /// What is done.
    pub script: Script,
}

impl Scenario {
    /// The scenario of a seed.
    pub fn random(seed: u64) -> Scenario {
        let random = &mut Random::new(seed);
        let mut options = Options::random(random);
        let size_bytes = options.random_size(random);
        if seed % ONE_JOB_IN == ONE_JOB_IN - 1 {
            return job(random, options, size_bytes);
        }
        let mut scenario = match random.below(100) {
            0..60 => {
                options.is_encrypted = !options.is_version_2 && random.chance(4);
                io(random, options, size_bytes)
            }
            60..84 => convert(random, options, size_bytes),
            84..94 => commit(random, options, size_bytes),
            _ => rebase(random, options, size_bytes),
        };
        let is_fill = matches!(scenario.script, Script::Io(_));
        if is_fill && scenario.room == Room::Full && seed % ONE_AMPLE_IN == ONE_AMPLE_IN / 2 {
            scenario.room = Room::Ample;
        }
        scenario
    }

    /// Whether the contract of `measure` promises that the script fits, whatever QEMU does.
    pub fn is_promised(&self) -> bool {
        let has_room = matches!(self.room, Room::Full | Room::Slack(_) | Room::Ample);
        match &self.script {
            Script::Io(_) | Script::Job(_) => has_room,
            // `-S 0` allocates more than `required` counts.
            Script::Convert(convert) => {
                has_room || self.room == Room::Required && !convert.words.iter().any(|w| w == "-S")
            }
            // The required size of a chain is no promise: the base may hold clusters that the overlay zeroes.
            Script::Commit { .. } | Script::Rebase { .. } => has_room,
        }
    }

    /// How many commands there are.
    pub fn weight(&self) -> usize {
        let groups = |batch: &Batch| batch.groups.len();
        let backing = self.backing.as_ref().map_or(0, groups);
        backing
            + match &self.script {
                Script::Io(batches) => batches.iter().map(groups).sum(),
                Script::Convert(convert) => groups(&convert.source) + convert.bitmaps.len() + 1,
                Script::Commit { base, overlay, .. } | Script::Rebase { base, overlay, .. } => {
                    groups(base) + groups(overlay) + 1
                }
                Script::Job(job) => groups(&job.base) + groups(&job.overlay) + 1,
            }
    }

    /// All batches of commands.
    fn batches(&mut self) -> Vec<&mut Batch> {
        let mut all: Vec<&mut Batch> = self.backing.iter_mut().collect();
        match &mut self.script {
            Script::Io(batches) => all.extend(batches),
            Script::Convert(convert) => all.push(&mut convert.source),
            Script::Commit { base, overlay, .. } | Script::Rebase { base, overlay, .. } => {
                all.extend([base, overlay]);
            }
            Script::Job(job) => all.extend([&mut job.base, &mut job.overlay]),
        }
        all
    }
}

fn io(random: &mut Random, options: Options, size_bytes: u64) -> Scenario {
    let cluster = options.cluster_bytes();
    let room = match random.below(100) {
        0..60 => Room::Full,
        60..75 => Room::Slack(random.between(1, 1 << 20) / 512 * 512),
        75..85 => Room::Slack(random.between(1, 3) * cluster),
        85..95 => Room::Part(random.between(900, 999)),
        _ => Room::Part(random.between(200, 999)),
    };
    // What fits in less may depend on which of several requests comes first.
    let is_concurrent = !matches!(room, Room::Part(_));
    let mut load = Load::new(random, size_bytes, cluster, is_concurrent);
    let batches = load.batches();
    let backing = random.chance(15).then(|| {
        let percent = random.between(5, 60);
        Load::new(random, size_bytes, cluster, false).part(percent)
    });
    Scenario {
        backing: backing.filter(|_| !options.is_encrypted),
        options,
        size_bytes,
        room,
        is_created_by_qemu: random.chance(40),
        script: Script::Io(batches),
    }
}

fn convert(random: &mut Random, options: Options, size_bytes: u64) -> Scenario {
    let has_bitmaps = !options.is_version_2 && random.chance(35);
    let room = match random.below(10) {
        0..6 => Room::Required,
        6..8 => Room::Full,
        8 => Room::Slack(random.between(1, 8) * options.cluster_bytes()),
        _ => Room::Part(random.between(300, 999)),
    };
    let mut words = Vec::new();
    let mut add = |more: &[&str]| words.extend(more.iter().map(|word| (*word).to_owned()));
    let is_compressed = random.chance(20);
    if is_compressed {
        add(&["-c"]);
    } else if !matches!(room, Room::Part(_)) && random.chance(50) {
        add(&["-W"]);
    }
    match random.below(3) {
        0 => add(&["-m", "16"]),
        1 => add(&["-m", random.pick(&["1", "2", "8"])]),
        _ => {}
    }
    match random.below(12) {
        0 => add(&["-S", "0"]),
        1 => add(&["-S", "4k"]),
        _ => {}
    }
    if has_bitmaps {
        add(&["--bitmaps"]);
    }
    let into_existing = !is_compressed && random.chance(30);
    let source_bits = random.pick(&[9, 12, 16, 16, options.cluster_bits]);
    let percent = random.pick(&[100, 100, 70, 30, 5]);
    let source = Load::new(random, size_bytes, 1 << source_bits.max(12), true).part(percent);
    let bitmaps = match has_bitmaps {
        true => bitmaps(random),
        false => Vec::new(),
    };
    Scenario {
        options,
        size_bytes,
        room,
        is_created_by_qemu: random.chance(40),
        backing: None,
        script: Script::Convert(Convert {
            source_bits,
            source,
            bitmaps,
            words,
            into_existing,
        }),
    }
}

fn bitmaps(random: &mut Random) -> Vec<Vec<String>> {
    let mut all = Vec::new();
    for number in 0..random.between(1, 4) {
        let mut words = vec!["--add".to_owned()];
        if random.chance(60) {
            let bits = random.between(9, 17);
            words.extend(["-g".to_owned(), (1_u64 << bits).to_string()]);
        }
        if random.chance(20) {
            words.push("--disable".into());
        }
        words.push(format!("bitmap{number}"));
        all.push(words);
    }
    all
}

fn commit(random: &mut Random, options: Options, size_bytes: u64) -> Scenario {
    let cluster = options.cluster_bytes();
    let percents = [random.between(0, 90), random.between(10, 100)];
    let [base, overlay] = percents.map(|percent| {
        let concurrent = random.chance(50);
        Load::new(random, size_bytes, cluster, concurrent).part(percent)
    });
    Scenario {
        room: random.pick(&[Room::Required, Room::Required, Room::Full]),
        size_bytes,
        is_created_by_qemu: true,
        backing: None,
        script: Script::Commit {
            base,
            overlay,
            keeps_overlay: random.chance(40),
        },
        options,
    }
}

fn job(random: &mut Random, options: Options, size_bytes: u64) -> Scenario {
    let cluster = options.cluster_bytes();
    let percents = [random.between(0, 100), random.pick(&[100, 100, 70, 30])];
    let [base, overlay] = percents.map(|percent| {
        let concurrent = random.chance(50);
        Load::new(random, size_bytes, cluster, concurrent).part(percent)
    });
    let kinds = [Kind::Mirror, Kind::Backup, Kind::Commit, Kind::Stream];
    Scenario {
        room: match random.chance(75) {
            true => Room::Full,
            false => Room::Slack(random.between(1, 64) * cluster),
        },
        size_bytes,
        is_created_by_qemu: random.chance(40),
        backing: None,
        script: Script::Job(Job {
            kind: random.pick(&kinds),
            base,
            overlay,
        }),
        options,
    }
}

fn rebase(random: &mut Random, options: Options, size_bytes: u64) -> Scenario {
    let cluster = options.cluster_bytes();
    let percents = [random.between(10, 100), random.between(0, 100)];
    let [base, overlay] = percents.map(|percent| {
        let concurrent = random.chance(50);
        Load::new(random, size_bytes, cluster, concurrent).part(percent)
    });
    Scenario {
        room: Room::Full,
        size_bytes,
        is_created_by_qemu: true,
        backing: None,
        script: Script::Rebase {
            base,
            overlay,
            alone: random.chance(70),
        },
        options,
    }
}

impl Shrinks for Scenario {
    fn smaller(&self) -> Vec<Scenario> {
        let mut found = Vec::new();
        let mut add = |change: &dyn Fn(&mut Scenario)| {
            let mut smaller = self.clone();
            change(&mut smaller);
            found.push(smaller);
        };
        if self.backing.is_some() {
            add(&|smaller| smaller.backing = None);
        }
        if let Script::Io(batches) = &self.script {
            for index in 0..batches.len() {
                add(&|smaller| {
                    if let Script::Io(batches) = &mut smaller.script {
                        batches.remove(index);
                    }
                });
            }
        }
        if let Script::Convert(convert) = &self.script {
            for index in 0..convert.bitmaps.len() {
                add(&|smaller| {
                    if let Script::Convert(convert) = &mut smaller.script {
                        convert.bitmaps.remove(index);
                    }
                });
            }
        }
        let lens = |batch: &&mut Batch| batch.groups.iter().map(Vec::len).collect();
        let all: Vec<Vec<usize>> = self.clone().batches().iter().map(lens).collect();
        for (index, lens) in all.into_iter().enumerate() {
            for (start, end) in halves(lens.len()) {
                add(&|smaller| drop(smaller.batches()[index].groups.drain(start..end)));
            }
            // Requests in flight together are taken apart once few of them are left.
            for (group, len) in lens.iter().enumerate().filter(|_| lens.len() <= FEW_GROUPS) {
                for (start, end) in halves(*len).into_iter().filter(|_| *len > 2) {
                    add(&|smaller| {
                        // The last command waits for the others.
                        let end = end.min(len - 1);
                        drop(smaller.batches()[index].groups[group].drain(start.min(end)..end));
                    });
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_names_one_scenario() {
        for seed in 0..50 {
            let [first, second] = [(); 2].map(|()| format!("{:?}", Scenario::random(seed)));
            assert_eq!(first, second);
        }
    }

    #[test]
    fn requests_in_flight_together_touch_no_byte_in_common() {
        for seed in 0..200 {
            let mut scenario = Scenario::random(seed);
            for batch in scenario.batches() {
                for group in batch.groups.iter().filter(|group| group.len() > 1) {
                    let mut ranges: Vec<(u64, u64)> = group
                        .iter()
                        .filter(|command| command.starts_with("aio_write"))
                        .map(|command| {
                            let words: Vec<&str> = command.split(' ').rev().collect();
                            let number = |at: usize| words[at].parse().unwrap_or(u64::MAX / 2);
                            (number(1), number(1) + number(0))
                        })
                        .collect();
                    ranges.sort_unstable();
                    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
                }
            }
        }
    }
}

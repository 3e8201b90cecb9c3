//! The command line of `vellum bench`: options, their defaults and limits.

use std::ffi::OsString;
use std::path::PathBuf;

use vellum::qcow2::WriteLogOptions;

use crate::getopt::UsageError;
use crate::size;
use crate::spec::{CommonArgs, Spec};

pub const SPEC: Spec = Spec {
    name: "bench",
    about: "Show what the choices of an image cost on this machine",
    usage: "\
[OPTIONS]           measure images made for it
[OPTIONS] IMAGE     measure reads of this image
",
    explains: "\
Shows what the choices of a qcow2 image cost on this machine: random 4K reads by L2 cache
size and by cache entry (slice) size, random 4K writes into new clusters by cluster size,
with and without subclusters, with and without a backing file, and how far the image grows.
With --journal: writes with a flush after each 32, over time, with and without a write log.
Each figure stands beside a raw file's, measured in the same run. An image that is given is
only read. A run whose rounds differ too much tells figures and how much they differ ('spread'
and 'noise' of --output=json), and draws no conclusions about speed.
",
    arguments: &["\
What to measure:
      --tables=LIST     of cache, slices, writes, overlay, journal (default: all but
                        journal)
      --journal         the table journal: what a write log (journal=on) brings, and what
                        comes when it is full; runs until ten times the log is written
      --journal-size=SIZE
                        length of that log (default 16M)
      --dir=DIR         where to make the images (default: the current directory);
                        they are removed at the end, and nothing else is touched
      --size=SIZE       size of the images (default 4G; needs twice that on the disk)
  -f, --format=FORMAT   format of IMAGE
      --image-opts      IMAGE is a list of key=value options
  -U, --force-share     IMAGE is in use by a writer

How to measure:
      --depth=N         requests in flight (default 32)
      --seconds=N       time for each figure in each round (default 0.3); the longest time
                        of a run of the table journal (default 10)
      --rounds=N        rounds, of which the medians are shown (default 3)
      --seed=N          where requests go (default 1)
      --full            20G, 2 seconds, 4 rounds and more cluster sizes; journal: a log of
                        64M, 60 seconds

What to show:
      --output=FORMAT   human (default) or json
      --html=FILE       write a page with plots as well
  -q, --quiet           no progress
  -h, --help            print this text
"],
    closing: "
'qemu-img bench', which sends requests as its options say and times them, is
'vellum img bench'.
",
    examples: "\
vellum bench --dir /srv/images
  images made in the folder that matters
vellum bench --html page.html disk.qcow2
  reads of an image, with plots
vellum bench --full --tables=writes
  longer, and one table only
vellum bench --journal --dir /srv/images --html page.html
  what a write log brings there, over time
",
    exits: "\
0  done
1  an error, which is told
130  ended by Ctrl-C; what was made is removed
",
    ..Spec::EMPTY
};

/// The smallest image that is worth measuring: its L2 tables take four slices.
pub(super) const MIN_SIZE_BYTES: u64 = 64 << 20;
/// More would only measure how many buffers fit into memory.
const MAX_DEPTH: usize = 1024;
const MAX_ROUNDS: usize = 1000;
const MAX_SECONDS: f64 = 3600.0;

/// A group of tables that can be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Topic {
    /// Random reads by cache size.
    Cache,
    /// Random reads by the size of a cache entry.
    Slices,
    /// Random writes into new clusters.
    Writes,
    /// The same over a backing file.
    Overlay,
    /// Random writes with flushes, with and without a write log, over time.
    Journal,
}

impl Topic {
    pub(super) const ALL: [Topic; 5] = [
        Topic::Cache,
        Topic::Slices,
        Topic::Writes,
        Topic::Overlay,
        Topic::Journal,
    ];
    /// Those of images that are made, if none is named: all but what takes longest.
    const USUAL: [Topic; 4] = [Topic::Cache, Topic::Slices, Topic::Writes, Topic::Overlay];

    pub(super) fn name(self) -> &'static str {
        match self {
            Topic::Cache => "cache",
            Topic::Slices => "slices",
            Topic::Writes => "writes",
            Topic::Overlay => "overlay",
            Topic::Journal => "journal",
        }
    }
}

/// How long and how hard to measure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Effort {
    /// Size of the images that are made.
    pub(super) size_bytes: u64,
    /// Requests in flight.
    pub(super) depth: usize,
    /// Time for each point in each round.
    pub(super) seconds: f64,
    pub(super) rounds: usize,
    pub(super) seed: u64,
    /// More points.
    pub(super) full: bool,
    pub(super) sustained: Sustained,
}

/// Writes with flushes between them, for as long as a write log cannot take them all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sustained {
    /// Length of the write log.
    pub(super) log_bytes: u64,
    /// Time for each run at most.
    pub(super) seconds: f64,
}

/// The command line, taken apart.
#[derive(Debug)]
pub(super) struct Arguments {
    pub(super) directory: PathBuf,
    pub(super) effort: Effort,
    pub(super) topics: Vec<Topic>,
    pub(super) common: CommonArgs,
    pub(super) html: Option<PathBuf>,
    pub(super) image: Option<String>,
}

/// What was given, before defaults.
#[derive(Default)]
struct Given {
    directory: Option<PathBuf>,
    size_bytes: Option<u64>,
    depth: Option<usize>,
    seconds: Option<f64>,
    rounds: Option<usize>,
    seed: Option<u64>,
    full: bool,
    topics: Option<Vec<Topic>>,
    journal: bool,
    log_bytes: Option<u64>,
}

impl Arguments {
    pub(super) fn parse(words: Vec<OsString>) -> Result<Arguments, UsageError> {
        let mut given = Given::default();
        let mut arguments = Arguments::default();
        arguments.common = SPEC.parse(words, |name, value| match name {
            "html" => {
                arguments.html = Some(value.into());
                Ok(())
            }
            _ => given.take(name, value),
        })?;
        match arguments.common.operands.as_slice() {
            [] => {}
            [image] => arguments.image = Some(image.clone()),
            _ => return Err("At most one image can be given".into()),
        }
        arguments.fill_in(given)?;
        Ok(arguments)
    }

    fn fill_in(&mut self, given: Given) -> Result<(), UsageError> {
        let defaults = match given.full {
            true => Effort::FULL,
            false => Effort::SHORT,
        };
        if self.image.is_some() && (given.size_bytes.is_some() || given.directory.is_some()) {
            return Err("--dir and --size are for images that are made; one was given".into());
        }
        self.effort = Effort {
            size_bytes: given.size_bytes.unwrap_or(defaults.size_bytes),
            depth: given.depth.unwrap_or(defaults.depth),
            seconds: given.seconds.unwrap_or(defaults.seconds),
            rounds: given.rounds.unwrap_or(defaults.rounds),
            seed: given.seed.unwrap_or(defaults.seed),
            full: given.full,
            sustained: Sustained {
                log_bytes: given.log_bytes.unwrap_or(defaults.sustained.log_bytes),
                seconds: given.seconds.unwrap_or(defaults.sustained.seconds),
            },
        };
        self.directory = given.directory.unwrap_or_else(|| ".".into());
        let readable: &[Topic] = match self.image {
            Some(_) => &[Topic::Cache, Topic::Slices],
            None => &Topic::ALL,
        };
        let usual = match self.image {
            Some(_) => readable,
            None => &Topic::USUAL,
        };
        self.topics = match (given.topics, given.journal) {
            (Some(topics), true) if topics.contains(&Topic::Journal) => topics,
            (Some(topics), true) => [topics.as_slice(), &[Topic::Journal]].concat(),
            (Some(topics), false) => topics,
            (None, true) => vec![Topic::Journal],
            (None, false) => usual.to_vec(),
        };
        if given.log_bytes.is_some() && !self.topics.contains(&Topic::Journal) {
            return Err("--journal-size is for the table 'journal': add --journal".into());
        }
        match self.topics.iter().find(|topic| !readable.contains(topic)) {
            Some(topic) => Err(format!(
                "An image that was given is only read: no table '{}'",
                topic.name()
            )
            .into()),
            None => Ok(()),
        }
    }
}

impl Default for Arguments {
    fn default() -> Self {
        Arguments {
            directory: ".".into(),
            effort: Effort::SHORT,
            topics: Topic::USUAL.to_vec(),
            common: CommonArgs::default(),
            html: None,
            image: None,
        }
    }
}

impl Effort {
    /// About a minute.
    const SHORT: Effort = Effort {
        size_bytes: 4 << 30,
        depth: 32,
        seconds: 0.3,
        rounds: 3,
        seed: 1,
        full: false,
        sustained: Sustained {
            log_bytes: 16 << 20,
            seconds: 10.0,
        },
    };
    /// `--full`.
    const FULL: Effort = Effort {
        size_bytes: 20 << 30,
        depth: 32,
        seconds: 2.0,
        rounds: 4,
        seed: 1,
        full: true,
        // The default length of a log.
        sustained: Sustained {
            log_bytes: 64 << 20,
            seconds: 60.0,
        },
    };
}

impl Given {
    fn take(&mut self, name: &str, value: String) -> Result<(), UsageError> {
        match name {
            "dir" => self.directory = Some(value.into()),
            "full" => self.full = true,
            "size" => {
                let bytes = size::parse(&value).ok();
                let bytes = bytes.filter(|bytes| (MIN_SIZE_BYTES..1 << 44).contains(bytes));
                let wanted = "--size expects a size from 64M to 16T";
                self.size_bytes = Some(bytes.map_or_else(|| bad(wanted, &value), Ok)?);
            }
            "depth" => {
                let depth = value.parse().ok();
                let depth = depth.filter(|depth| (1..=MAX_DEPTH).contains(depth));
                let wanted = "--depth expects a number from 1 to 1024";
                self.depth = Some(depth.map_or_else(|| bad(wanted, &value), Ok)?);
            }
            "seconds" => {
                let seconds = value.parse().ok();
                let seconds = seconds.filter(|seconds| (0.01..=MAX_SECONDS).contains(seconds));
                let wanted = "--seconds expects a number from 0.01 to 3600";
                self.seconds = Some(seconds.map_or_else(|| bad(wanted, &value), Ok)?);
            }
            "rounds" => {
                let rounds = value.parse().ok();
                let rounds = rounds.filter(|rounds| (1..=MAX_ROUNDS).contains(rounds));
                let wanted = "--rounds expects a number from 1 to 1000";
                self.rounds = Some(rounds.map_or_else(|| bad(wanted, &value), Ok)?);
            }
            "seed" => {
                let seed = value.parse().ok();
                let wanted = "--seed expects a number";
                self.seed = Some(seed.map_or_else(|| bad(wanted, &value), Ok)?);
            }
            "tables" => self.topics = Some(parse_topics(&value)?),
            "journal" => self.journal = true,
            "journal-size" => {
                let bytes = size::parse(&value).ok().filter(is_log_length);
                let wanted = "--journal-size expects a multiple of 4K from 72K to 1G";
                self.log_bytes = Some(bytes.map_or_else(|| bad(wanted, &value), Ok)?);
            }
            _ => return Err(UsageError::not_taken(name)),
        }
        Ok(())
    }
}

fn is_log_length(bytes: &u64) -> bool {
    let lengths = WriteLogOptions::MIN_LEN_BYTES..=WriteLogOptions::MAX_LEN_BYTES;
    lengths.contains(bytes) && bytes.is_multiple_of(4096)
}

fn bad<T>(wanted: &str, value: &str) -> Result<T, UsageError> {
    Err(format!("{wanted}, not '{value}'").into())
}

fn parse_topics(value: &str) -> Result<Vec<Topic>, UsageError> {
    let named = |name: &str| {
        let topic = Topic::ALL.into_iter().find(|topic| topic.name() == name);
        let wanted = "--tables expects a list of cache, slices, writes, overlay, journal";
        topic.map_or_else(|| bad(wanted, name), Ok)
    };
    value.split(',').map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments, String> {
        let words = line.split_whitespace().map(OsString::from).collect();
        Arguments::parse(words).map_err(|failure| failure.to_string())
    }

    #[test]
    fn defaults_depend_on_full() {
        let short = parse("--dir /x").unwrap();
        assert_eq!(short.effort, Effort::SHORT);
        assert_eq!(short.topics, Topic::USUAL);
        let full = parse("--full --size 1G --depth=4").unwrap();
        let expected = Effort {
            size_bytes: 1 << 30,
            depth: 4,
            ..Effort::FULL
        };
        assert_eq!(full.effort, expected);
    }

    #[test]
    fn a_given_image_is_only_read() {
        let given = parse("disk.qcow2 -U").unwrap();
        assert_eq!(given.topics, [Topic::Cache, Topic::Slices]);
        assert!(given.common.force_share);
        for refused in [
            "disk.qcow2 --tables=writes",
            "disk.qcow2 --size 1G",
            "disk.qcow2 --dir /x",
            "a b",
        ] {
            assert!(parse(refused).is_err(), "{refused}");
        }
    }

    #[test]
    fn the_write_log_is_measured_only_if_asked_for() {
        let topics = |line: &str| parse(line).unwrap().topics;
        assert_eq!(topics("--journal"), [Topic::Journal]);
        assert_eq!(topics("--tables=journal"), [Topic::Journal]);
        assert_eq!(topics("--journal --tables=journal"), [Topic::Journal]);
        let both = [Topic::Overlay, Topic::Journal];
        assert_eq!(topics("--journal --tables=overlay"), both);
        let set = parse("--journal --journal-size=72K --seconds=3").unwrap();
        let expected = Sustained {
            log_bytes: 72 << 10,
            seconds: 3.0,
        };
        assert_eq!(set.effort.sustained, expected);
        assert!(parse("--journal-size=1M").is_err());
        assert!(parse("--journal disk.qcow2").is_err());
    }

    #[test]
    fn wrong_values_are_told() {
        for (line, message) in [
            (
                "--size 1M",
                "--size expects a size from 64M to 16T, not '1M'",
            ),
            (
                "--depth 0",
                "--depth expects a number from 1 to 1024, not '0'",
            ),
            (
                "--seconds nan",
                "--seconds expects a number from 0.01 to 3600, not 'nan'",
            ),
            (
                "--rounds x",
                "--rounds expects a number from 1 to 1000, not 'x'",
            ),
            (
                "--tables cache,x",
                "--tables expects a list of cache, slices, writes, overlay, journal, not 'x'",
            ),
            (
                "--journal-size 71K",
                "--journal-size expects a multiple of 4K from 72K to 1G, not '71K'",
            ),
            (
                "--output xml",
                "--output expects 'human' or 'json' not 'xml'",
            ),
        ] {
            assert_eq!(parse(line).unwrap_err(), message);
        }
    }
}

//! The operations of a scenario in batches: each is one run of `qemu-io` with its commands, and
//! what other tools do to the image before it (snapshots, bitmaps, a resize, an amend).

use super::access;
use super::shape::Shape;
use super::snapshots::Change;
use crate::random::Random;

/// What one command line of the tool holds: its options and its commands.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Options of the tool.
    pub mode: Mode,
    /// The commands, in groups that only make sense together.
    pub groups: Vec<Vec<String>>,
    /// Change the internal snapshots before, in this order.
    pub snapshots: Vec<Change>,
    /// Change the size before, to this.
    pub resize: Option<u64>,
    /// Commands on bitmaps before.
    pub bitmaps: Vec<Vec<String>>,
    /// Amend the image before, with these options.
    pub amend: Option<String>,
}

/// How the tool opens the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// As it does by itself.
    Plain,
    /// With options of the command line.
    Flags(&'static [&'static str]),
    /// By driver options; zeroes in writes are noticed.
    DetectZeroes(&'static str),
}

impl Mode {
    fn random(random: &mut Random, shape: &Shape) -> Mode {
        match random.below(20) {
            0 => Mode::Flags(&["-d", "ignore"]),
            1 if shape.takes_direct_io() => Mode::Flags(&["-n"]),
            2 => Mode::Flags(&["-t", "unsafe"]),
            3 => Mode::Flags(&["-t", "writethrough"]),
            4 => Mode::DetectZeroes("on"),
            5 => Mode::DetectZeroes("unmap"),
            _ => Mode::Plain,
        }
    }

    /// The words of the command line before the commands.
    pub fn words(self, shape: &Shape, image: &str) -> Vec<String> {
        let owned = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
        match self {
            Mode::Plain => access::image(shape, image),
            Mode::Flags(flags) => [owned(flags), access::image(shape, image)].concat(),
            Mode::DetectZeroes(how) => {
                let image = access::image_opts(shape, image);
                let spec = format!("{image},discard=unmap,detect-zeroes={how}");
                [access::objects(shape), owned(&["--image-opts", &spec])].concat()
            }
        }
    }
}

impl Batch {
    /// A batch out of all there are.
    pub fn random(random: &mut Random, shape: &Shape) -> Batch {
        let snapshots = match shape.can_snapshot() && random.chance(35) {
            true => (0..random.between(1, 3))
                .map(|_| Change::random(random))
                .collect(),
            false => Vec::new(),
        };
        let mode = Mode::random(random, shape);
        let count = random.between(1, 14);
        let groups = (0..count).map(|_| group(random, shape)).collect();
        Batch {
            mode,
            groups,
            snapshots,
            resize: (random.chance(20) && shape.can(|format| format.resizes_alike))
                .then(|| new_size(random, shape)),
            bitmaps: Vec::new(),
            amend: (shape.foreign.is_none() && random.chance(20)).then(|| amendment(random, shape)),
        }
    }
}

/// Options to amend. Both tools accept them, or refuse them in the same words.
fn amendment(random: &mut Random, shape: &Shape) -> String {
    // Snapshots are taken of images that have room for them in their refcounts.
    let widths: &[u32] = match shape.can_snapshot() {
        true => &[8, 16, 32, 64],
        false => &[1, 2, 4, 8, 16, 32, 64],
    };
    match random.below(8) {
        0..3 => "compat=0.10".into(),
        3..5 => "compat=1.1".into(),
        5 => format!("lazy_refcounts={}", random.pick(&["on", "off"])),
        6 => "data_file_raw=off".into(),
        _ => match (random.pick(widths), shape.can_change_refcounts()) {
            (width, true) => format!("refcount_bits={width}"),
            (_, false) => "compat=1.1".into(),
        },
    }
}

/// A size around the first one. What shrinking leaves of a cluster QEMU shows again
/// when the image grows, and Vellum does not; so it leaves whole ones.
fn new_size(random: &mut Random, shape: &Shape) -> u64 {
    let unit = match random.chance(50) {
        true => shape.cluster_bytes(),
        false => 512,
    };
    let more = random.between(0, 8 * shape.cluster_bytes().max(65536)) / unit * unit;
    match random.chance(60) {
        true => (shape.size_bytes + more).next_multiple_of(512),
        false => {
            let cluster = shape.cluster_bytes();
            (shape.size_bytes.saturating_sub(more) / cluster * cluster).max(cluster)
        }
    }
}

fn group(random: &mut Random, shape: &Shape) -> Vec<String> {
    let (offset, len) = range(random, shape);
    let pattern = if random.chance(20) {
        0
    } else {
        random.below(256)
    };
    let (start, filled) = written(shape, pattern, offset, len);
    let one = match random.below(100) {
        0..32 => format!("write -q -P {pattern} {start} {filled}"),
        32..35 => format!("write -q -f -P {pattern} {start} {filled}"),
        35..40 => match random.between(0, filled) {
            // An empty part makes QEMU 10 abort where it has to align the request.
            first if first == 0 || first == filled => {
                format!("writev -q -P {pattern} {start} {filled}")
            }
            first => format!("writev -q -P {pattern} {start} {first} {}", filled - first),
        },
        40..52 => format!("write -q -z {}", zeroed(shape, offset, len)),
        52..64 => format!("write -q -z -u {}", zeroed(shape, offset, len)),
        // Ours has less to write than QEMU where blocks are missing, and so refuses less.
        64..66 if shape.foreign.is_none() => {
            format!("write -q -z -n {}", zeroed(shape, offset, len))
        }
        64..66 => format!("write -q -z -u {}", zeroed(shape, offset, len)),
        66..80 if !shape.can(|format| format.discards_alike) => {
            format!("write -q -z -u {}", zeroed(shape, offset, len))
        }
        66..80 => format!("discard -q {offset} {len}"),
        80..86 => format!("read -v {offset} {}", len.min(600)),
        86..88 => format!("readv -v {offset} {} 10", len.min(300)),
        // Where nothing is, ours does not make blocks of zeroes, and QEMU does.
        88..92 if shape.foreign.is_some() => format!("read -v {offset} {}", len.min(600)),
        88..91 => format!("alloc {offset} {len}"),
        91..92 => "map".into(),
        92..94 => "flush".into(),
        94..95 => "length".into(),
        _ if shape.can(|format| format.writes_at_once) => return simultaneous(random, shape),
        _ => format!("write -q -P {pattern} {start} {filled}"),
    };
    vec![one]
}

/// The range of a write of zeroes. In encrypted images QEMU writes the rest of sectors as
/// data, where Vellum calls subclusters zero that read so anyway; so there they are whole
/// ones. The same goes for zeroes that are found in data.
fn written(shape: &Shape, pattern: u64, offset: u64, len: u64) -> (u64, u64) {
    let unit = if shape.encrypted && pattern == 0 {
        512
    } else {
        1
    };
    let start = offset / unit * unit;
    let end = (offset + len).next_multiple_of(unit);
    (start, end - start)
}

/// The operands of a write of zeroes.
fn zeroed(shape: &Shape, offset: u64, len: u64) -> String {
    let (start, len) = written(shape, 0, offset, len);
    format!("{start} {len}")
}

/// Several requests at once. They touch no cluster in common: what becomes of
/// two at once in one cluster may depend on which comes first.
fn simultaneous(random: &mut Random, shape: &Shape) -> Vec<String> {
    let mut commands = Vec::new();
    let mut taken: Vec<(u64, u64)> = Vec::new();
    for _ in 0..random.between(2, 8) {
        let (offset, len) = range(random, shape);
        let clusters = (
            offset / shape.cluster_bytes(),
            (offset + len).div_ceil(shape.cluster_bytes()),
        );
        if taken
            .iter()
            .any(|&(start, end)| clusters.0 < end && start < clusters.1)
        {
            continue;
        }
        taken.push(clusters);
        commands.push(match random.below(5) {
            0 => format!("aio_write -q -z {}", zeroed(shape, offset, len)),
            1 => format!("aio_write -q -z -u {}", zeroed(shape, offset, len)),
            _ => {
                let pattern = random.below(256);
                let (start, len) = written(shape, pattern, offset, len);
                format!("aio_write -q -P {pattern} {start} {len}")
            }
        });
    }
    commands.push("aio_flush".into());
    commands
}

/// A range: now at bytes, now at sectors, subclusters or clusters; sometimes up
/// to the very end, rarely beyond it.
fn range(random: &mut Random, shape: &Shape) -> (u64, u64) {
    let (cluster, sub) = (shape.cluster_bytes(), shape.subcluster_bytes());
    let unit = random.pick(&[1, 512, 512, 4096, sub, sub, cluster, cluster]);
    let longest = random.pick(&[
        unit,
        4 * unit,
        sub,
        3 * sub,
        cluster,
        3 * cluster,
        6 * cluster,
    ]);
    let longest = longest.clamp(1, 4 << 20);
    let spot = random.pick(&shape.spots);
    let offset = (spot + random.below(shape.reach_bytes)) / unit * unit;
    let len = (random.between(1, longest) / unit * unit).max(unit.min(longest));
    let left = shape.size_bytes.saturating_sub(offset);
    match random.below(100) {
        0..10 if left <= 8 << 20 => (offset, left.max(1)),
        10..12 => (offset, len),
        _ => (offset, len.min(left).max(1)),
    }
}

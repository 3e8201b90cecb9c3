//! The shape of a scenario's images: creation options and backing files.

use std::ops::Range;

use super::access;
use super::foreign::Foreign;
use crate::random::Random;

const SECTOR_BYTES: u64 = 512;
/// The largest disk.
pub const LARGEST_BYTES: u64 = 1 << 36;
/// A compressed write of a qcow2 image has at most so many clusters.
pub const MOST_COMPRESSED: u64 = 3;

/// Where guest data lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataFile {
    /// In the image.
    Inside,
    /// In another file.
    External,
    /// In another file that is a raw image of the disk.
    ExternalRaw,
}

/// A file behind the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backing {
    /// Its name.
    pub name: String,
    /// Its format.
    pub format: &'static str,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Its creation options, where it has some.
    pub options: String,
    /// The commands that fill it.
    pub commands: Vec<String>,
}

/// How an image is made.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Another format than qcow2, with its creation options: then only those below count that are
    /// not of qcow2 alone.
    pub foreign: Option<(&'static Foreign, &'static str)>,
    /// The virtual size in bytes.
    pub size_bytes: u64,
    /// Cluster size, as a power of two.
    pub cluster_bits: u32,
    /// `0.10` or `1.1`.
    pub version: u32,
    /// Width of a refcount.
    pub refcount_bits: u32,
    /// 32 subclusters a cluster.
    pub extended_l2: bool,
    /// Refcounts may lag behind.
    pub lazy_refcounts: bool,
    /// `zlib` or `zstd`.
    pub compression: &'static str,
    /// Where data lives.
    pub data_file: DataFile,
    /// Guest data is encrypted, with LUKS or as the format can.
    pub encrypted: bool,
    /// How much is allocated at once.
    pub preallocation: &'static str,
    /// The files behind it, the nearest last.
    pub chain: Vec<Backing>,
    /// Offsets around which things happen.
    pub spots: Vec<u64>,
    /// How far around a spot.
    pub reach_bytes: u64,
}

impl Shape {
    /// A shape out of all there are.
    pub fn random(random: &mut Random) -> Shape {
        let version = if random.chance(15) { 2 } else { 3 };
        let extended_l2 = version == 3 && random.chance(40);
        let cluster_bits = match extended_l2 {
            true => random.pick(&[14, 14, 15, 16, 16, 17, 18, 19, 20, 21]),
            false => random.pick(&[
                9, 9, 10, 11, 12, 12, 13, 14, 15, 16, 16, 16, 17, 18, 19, 20, 21,
            ]),
        };
        let data_file = match random.below(100) {
            0..8 if version == 3 => DataFile::External,
            8..16 if version == 3 => DataFile::ExternalRaw,
            _ => DataFile::Inside,
        };
        let refcount_bits = match version {
            3 => random.pick(&[1, 2, 4, 8, 16, 16, 16, 32, 64]),
            _ => 16,
        };
        let mut shape = Shape {
            foreign: None,
            size_bytes: 0,
            cluster_bits,
            version,
            refcount_bits,
            extended_l2,
            lazy_refcounts: version == 3 && random.chance(20),
            compression: if version == 3 && random.chance(30) {
                "zstd"
            } else {
                "zlib"
            },
            data_file,
            encrypted: false,
            preallocation: "off",
            chain: Vec::new(),
            spots: vec![0],
            reach_bytes: 0,
        };
        shape.choose_size(random);
        if data_file != DataFile::ExternalRaw && random.chance(50) {
            shape.choose_chain(random);
        }
        let can_preallocate = shape.chain.is_empty() && shape.spots.len() == 1;
        if can_preallocate && random.chance(12) {
            shape.preallocation = random.pick(&["metadata", "falloc", "full"]);
        }
        // What QEMU makes ahead in encrypted images reads as noise.
        let can_encrypt = shape.preallocation == "off" && data_file != DataFile::ExternalRaw;
        // QEMU 10 aborts where it is asked for the map of 2 GiB of nothing that is encrypted.
        shape.encrypted = can_encrypt && random.chance(8) && shape.size_bytes < 1 << 30;
        shape
    }

    /// Cluster size in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Subcluster size in bytes.
    pub fn subcluster_bytes(&self) -> u64 {
        self.cluster_bytes() / if self.extended_l2 { 32 } else { 1 }
    }

    /// Chooses the size, and how much of it is used.
    pub fn choose_size(&mut self, random: &mut Random) {
        let most_clusters = match self.cluster_bits {
            0..=12 => 300,
            13..=16 => 40,
            _ => 6,
        };
        let clusters = random.between(1, most_clusters);
        self.reach_bytes = clusters * self.cluster_bytes();
        if random.chance(50) {
            // The last cluster is only partly inside.
            let sectors = self.cluster_bytes() / SECTOR_BYTES;
            self.reach_bytes -= random.below(sectors) * SECTOR_BYTES;
        }
        self.size_bytes = self.reach_bytes;
        if self.cluster_bits >= 12 && random.chance(10) {
            self.widen(random);
        }
    }

    /// A large disk that is used at its start, at its end, and around the border
    /// between two L2 tables.
    fn widen(&mut self, random: &mut Random) {
        let entry_bytes = if self.extended_l2 { 16 } else { 8 };
        let table_reach = self.cluster_bytes() / entry_bytes * self.cluster_bytes();
        let most_bytes = self
            .foreign
            .map_or(LARGEST_BYTES, |(format, _)| format.most_bytes);
        let more_bytes = random.below(most_bytes / SECTOR_BYTES) * SECTOR_BYTES;
        if self.data_file == DataFile::ExternalRaw {
            // All of it is mapped from the start, and would all be compared.
            return;
        }
        self.size_bytes = self.reach_bytes + more_bytes;
        let border = table_reach.saturating_sub(self.reach_bytes / 2);
        let end = self.size_bytes - self.reach_bytes;
        self.spots.push(end);
        if border < end {
            self.spots.push(border);
        }
    }

    fn choose_chain(&mut self, random: &mut Random) {
        let depth = if random.chance(20) { 2 } else { 1 };
        for level in 0..depth {
            let below = self.chain.last().cloned();
            let backing = self.random_backing(random, level, below);
            self.chain.push(backing);
        }
    }

    fn random_backing(&self, random: &mut Random, level: usize, below: Option<Backing>) -> Backing {
        let raw = below.is_none() && random.chance(40);
        let reach = self.reach_bytes;
        let size_bytes = match random.below(3) {
            0 => self.size_bytes,
            1 => random.between(1, reach.div_ceil(SECTOR_BYTES)) * SECTOR_BYTES,
            _ => self.size_bytes + random.between(1, 64) * 4096,
        };
        let mut options = String::new();
        let mut commands = Vec::new();
        let cluster_bits = random.pick(&[12, 16, self.cluster_bits]);
        if !raw {
            options = format!("cluster_size={}", 1_u64 << cluster_bits);
        }
        if let Some(below) = below {
            options.push_str(&format!(
                ",backing_file={},backing_fmt={}",
                below.name, below.format
            ));
        } else if !raw && random.chance(30) {
            commands.extend(compressed_write(
                random,
                size_bytes.min(reach),
                cluster_bits,
                MOST_COMPRESSED,
                &mut Vec::new(),
            ));
        }
        for _ in 0..random.between(0, 5) {
            let offset = random.below(size_bytes.min(reach));
            let unit = random.pick(&[1, 512, 4096]);
            let offset = offset / unit * unit;
            let most = (size_bytes - offset)
                .min(3 * self.cluster_bytes())
                .min(1 << 20);
            let len = random.between(1, most);
            commands.push(match random.below(8) {
                0 => format!("write -q -z {offset} {len}"),
                _ => format!("write -q -P {} {offset} {len}", random.between(0, 255)),
            });
        }
        Backing {
            name: format!("base{level}"),
            format: if raw { "raw" } else { "qcow2" },
            size_bytes,
            options,
            commands,
        }
    }

    /// The name of the images' format.
    pub fn format(&self) -> &'static str {
        self.foreign.map_or("qcow2", |(format, _)| format.name)
    }

    /// The value of `-o` for an image of this name.
    pub fn options(&self, image: &str) -> String {
        if let Some((_, options)) = self.foreign {
            let backing = self.chain.last().map(|backing| {
                let (name, format) = (&backing.name, backing.format);
                format!("backing_file={name},backing_fmt={format}")
            });
            let options = Some(options.to_owned()).filter(|options| !options.is_empty());
            let all: Vec<String> = options.into_iter().chain(backing).collect();
            return all.join(",");
        }
        let mut options = format!("cluster_size={}", self.cluster_bytes());
        let mut add = |text: String| {
            options.push(',');
            options.push_str(&text);
        };
        add(format!(
            "compat={}",
            if self.version == 2 { "0.10" } else { "1.1" }
        ));
        add(format!("refcount_bits={}", self.refcount_bits));
        if self.extended_l2 {
            add("extended_l2=on".into());
        }
        if self.lazy_refcounts {
            add("lazy_refcounts=on".into());
        }
        if self.compression != "zlib" {
            add(format!("compression_type={}", self.compression));
        }
        match self.data_file {
            DataFile::Inside => {}
            DataFile::External => add(format!("data_file={image}.data")),
            DataFile::ExternalRaw => add(format!("data_file={image}.data,data_file_raw=on")),
        }
        if self.encrypted {
            add(access::ENCRYPT.into());
        }
        if self.preallocation != "off" {
            add(format!("preallocation={}", self.preallocation));
        }
        if let Some(backing) = self.chain.last() {
            add(format!(
                "backing_file={},backing_fmt={}",
                backing.name, backing.format
            ));
        }
        options
    }

    /// Whether the format can do something; qcow2 can all.
    pub fn can(&self, what: fn(&Foreign) -> bool) -> bool {
        self.foreign.is_none_or(|(format, _)| what(format))
    }

    /// Whether the second image is a copy of the first, which says nothing that depends
    /// on its name: to make a key slot takes either tool a second or two.
    pub fn can_copy(&self) -> bool {
        self.encrypted && self.data_file == DataFile::Inside
    }

    /// Whether QEMU's direct I/O leaves images whole: of a fixed VPC image it makes the file longer, so that the
    /// footer is not its end.
    pub fn takes_direct_io(&self) -> bool {
        self.foreign
            .is_none_or(|(format, options)| format.name != "vpc" || !options.contains("fixed"))
    }

    /// Whether there may be compressed writes at first: those to clusters that are
    /// allocated already QEMU refuses.
    pub fn can_compress(&self) -> bool {
        if let Some((format, _)) = self.foreign {
            return format.compresses && !self.encrypted;
        }
        self.data_file == DataFile::Inside && !self.encrypted && self.preallocation == "off"
    }

    /// Whether QEMU is done with another width of refcounts in a second or two: it looks
    /// at every count that a cluster of refcount table can lead to.
    pub fn can_change_refcounts(&self) -> bool {
        let counts = self.cluster_bytes() * self.cluster_bytes() / u64::from(self.refcount_bits);
        counts <= 1 << 28
    }

    /// Whether internal snapshots can be taken: several compressed clusters share
    /// a host cluster, so narrow refcounts would overflow.
    pub fn can_snapshot(&self) -> bool {
        self.data_file == DataFile::Inside && !self.encrypted && self.refcount_bits >= 8
    }
}

/// A compressed write of up to so many whole clusters, none of which is `taken` yet.
pub fn compressed_write(
    random: &mut Random,
    size_bytes: u64,
    cluster_bits: u32,
    most_clusters: u64,
    taken: &mut Vec<Range<u64>>,
) -> Option<String> {
    let cluster = 1_u64 << cluster_bits;
    let clusters = size_bytes / cluster;
    if clusters == 0 {
        return None;
    }
    let offset = random.below(clusters) * cluster;
    let most = ((size_bytes - offset) / cluster).min(most_clusters);
    let len = random.between(1, most) * cluster;
    let overlaps = |other: &Range<u64>| other.start < offset + len && offset < other.end;
    if taken.iter().any(overlaps) {
        return None;
    }
    taken.push(offset..offset + len);
    Some(format!(
        "write -q -c -P {} {offset} {len}",
        random.between(0, 255)
    ))
}

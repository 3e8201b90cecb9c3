//! Formats other than qcow2, as scenarios see them.

use super::shape::{Backing, DataFile, LARGEST_BYTES, Shape};
use crate::random::Random;

/// A format of which QEMU writes images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Foreign {
    /// The driver's name.
    pub name: &'static str,
    /// Creation options; each is one that scenarios choose.
    options: &'static [&'static str],
    /// Sizes of blocks that the options lead to, as powers of two.
    block_bits: &'static [u32],
    /// Formats that may stand behind it.
    backing: &'static [&'static str],
    /// `write -c` is a command of it: compressed writes may come first.
    pub compresses: bool,
    /// QEMU tells in maps what is where: of the others it calls everything data.
    pub has_maps: bool,
    /// Both tools do the same with its size.
    pub resizes_alike: bool,
    /// So they do with discards. Where the disk ends inside of a cluster, QEMU leaves that as it is in others.
    pub discards_alike: bool,
    /// QEMU does several requests at once without an assertion that fails.
    pub writes_at_once: bool,
    /// How large a disk may be for QEMU to be done in seconds: some it reads whole, of others
    /// it looks at every cluster by itself.
    pub most_bytes: u64,
}

const FORMATS: &[Foreign] = &[
    Foreign {
        name: "vmdk",
        options: &[
            "subformat=monolithicSparse",
            "subformat=monolithicSparse,zeroed_grain=on",
            "subformat=twoGbMaxExtentSparse",
            "subformat=monolithicFlat",
            "subformat=twoGbMaxExtentFlat",
        ],
        block_bits: &[16],
        backing: &["vmdk"],
        compresses: false,
        has_maps: true,
        resizes_alike: true,
        discards_alike: true,
        writes_at_once: true,
        most_bytes: LARGEST_BYTES,
    },
    Foreign {
        name: "vhdx",
        options: &[
            "block_size=1M",
            "block_size=2M,block_state_zero=off",
            "subformat=fixed",
        ],
        block_bits: &[20, 21],
        backing: &[],
        compresses: false,
        has_maps: false,
        resizes_alike: true,
        discards_alike: true,
        writes_at_once: true,
        most_bytes: 1 << 30,
    },
    Foreign {
        name: "vpc",
        options: &[
            "force_size=on",
            "subformat=fixed,force_size=on",
            "subformat=dynamic",
        ],
        block_bits: &[21],
        backing: &[],
        compresses: false,
        has_maps: true,
        resizes_alike: true,
        discards_alike: true,
        writes_at_once: true,
        most_bytes: LARGEST_BYTES,
    },
    Foreign {
        name: "vdi",
        options: &["static=off", "static=on"],
        block_bits: &[20],
        backing: &[],
        compresses: false,
        has_maps: true,
        resizes_alike: true,
        discards_alike: true,
        writes_at_once: true,
        most_bytes: LARGEST_BYTES,
    },
    Foreign {
        name: "parallels",
        options: &["cluster_size=64k", "cluster_size=1M"],
        block_bits: &[16, 20],
        backing: &[],
        compresses: false,
        has_maps: true,
        resizes_alike: false,
        discards_alike: false,
        writes_at_once: true,
        most_bytes: LARGEST_BYTES,
    },
    Foreign {
        name: "qed",
        options: &[
            "cluster_size=4k,table_size=16",
            "cluster_size=64k",
            "table_size=16",
        ],
        block_bits: &[12, 16],
        // Around what it writes to a cluster of zeroes QEMU writes what the backing file has.
        backing: &[],
        compresses: false,
        has_maps: true,
        resizes_alike: true,
        discards_alike: true,
        writes_at_once: false,
        // An assertion of QEMU's fails for the map of a larger run of nothing.
        most_bytes: 1 << 30,
    },
    Foreign {
        name: "qcow",
        options: &["", "encrypt.format=aes,encrypt.key-secret=s"],
        block_bits: &[12],
        backing: &["raw", "qcow", "qcow2"],
        compresses: true,
        has_maps: true,
        resizes_alike: true,
        discards_alike: true,
        writes_at_once: true,
        most_bytes: 128 << 20,
    },
];

impl Foreign {
    /// The format of that name.
    pub fn named(name: &str) -> Option<&'static Foreign> {
        FORMATS.iter().find(|format| format.name == name)
    }

    /// The names of all of them.
    pub fn names() -> String {
        let names: Vec<&str> = FORMATS.iter().map(|format| format.name).collect();
        names.join(", ")
    }

    /// A shape of this format. What only qcow2 has is off.
    pub fn shape(&'static self, random: &mut Random) -> Shape {
        let options = match self.options {
            [] => "",
            options => random.pick(options),
        };
        let mut shape = Shape {
            foreign: Some((self, options)),
            size_bytes: 0,
            cluster_bits: random.pick(self.block_bits),
            version: 2,
            refcount_bits: 1,
            extended_l2: false,
            lazy_refcounts: false,
            compression: "zlib",
            data_file: DataFile::Inside,
            encrypted: options.contains("encrypt."),
            preallocation: "off",
            chain: Vec::new(),
            spots: vec![0],
            reach_bytes: 0,
        };
        shape.choose_size(random);
        let takes_backing = !self.backing.is_empty() && !options.contains("Flat");
        if takes_backing && random.chance(50) {
            let format = random.pick(self.backing);
            let backing = self.backing_of(random, &shape, format);
            if self.name == "qcow" {
                // Its clusters are smaller then.
                shape.cluster_bits = 9;
            }
            shape.chain.push(backing);
        }
        shape
    }

    fn backing_of(&self, random: &mut Random, shape: &Shape, format: &'static str) -> Backing {
        // A VMDK is as large as what it stands on.
        let size_bytes = match (random.below(3), self.name) {
            (1, "qcow") => random.between(1, shape.reach_bytes.div_ceil(512)) * 512,
            (2, "qcow") => shape.size_bytes + random.between(1, 64) * 4096,
            _ => shape.size_bytes,
        };
        let commands = (0..random.between(0, 5)).map(|_| {
            let offset = random.below(size_bytes.min(shape.reach_bytes)) / 512 * 512;
            let most = (size_bytes - offset)
                .min(3 * shape.cluster_bytes())
                .min(1 << 20);
            let len = random.between(1, most);
            format!("write -q -P {} {offset} {len}", random.between(0, 255))
        });
        Backing {
            name: "base0".to_owned(),
            format,
            size_bytes,
            options: String::new(),
            commands: commands.collect(),
        }
    }
}

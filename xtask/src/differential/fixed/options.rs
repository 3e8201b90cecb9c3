//! Creation options of an image of fixed length, and the words that name it on a command line.

use super::super::access::{ENCRYPT, SECRET};
use crate::fixed_length::Address;
use crate::random::Random;

/// How an image is created.
#[derive(Debug, Clone)]
pub struct Options {
    /// Cluster size, as a power of two.
    pub cluster_bits: u32,
    /// `compat=0.10`.
    pub is_version_2: bool,
    /// Width of a refcount.
    pub refcount_bits: u32,
    /// 32 subclusters a cluster.
    pub extended_l2: bool,
    /// Refcounts may lag behind.
    pub lazy_refcounts: bool,
    /// LUKS.
    pub is_encrypted: bool,
}

impl Options {
    /// Options of all kinds, without encryption.
    pub fn random(random: &mut Random) -> Options {
        let is_version_2 = random.chance(10);
        let extended_l2 = !is_version_2 && random.chance(25);
        let cluster_bits = match extended_l2 {
            true => random.pick(&[14, 15, 16, 16, 17, 18, 21]),
            false => random.pick(&[9, 9, 10, 11, 12, 13, 14, 15, 16, 16, 16, 17, 18, 19, 20, 21]),
        };
        Options {
            cluster_bits,
            is_version_2,
            refcount_bits: match is_version_2 {
                true => 16,
                false => random.pick(&[1, 2, 8, 16, 16, 16, 16, 32, 64]),
            },
            extended_l2,
            lazy_refcounts: !is_version_2 && random.chance(15),
            is_encrypted: false,
        }
    }

    /// Cluster size in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// A virtual size of a whole number of clusters: several L2 tables and refcount blocks where
    /// clusters are small, and no more than 64 MiB.
    pub fn random_size(&self, random: &mut Random) -> u64 {
        let (low, high) = match self.cluster_bits {
            0..=10 => (200, 16 << 10),
            11..=12 => (200, 4 << 10),
            13..=16 => (64, 640),
            17..=18 => (16, 160),
            _ => (4, 28),
        };
        random.between(low, high) * self.cluster_bytes()
    }

    /// The value of `-o`, for `create`, `convert` and `measure`.
    pub fn value(&self) -> String {
        let mut value = format!("cluster_size={}", self.cluster_bytes());
        if self.is_version_2 {
            value.push_str(",compat=0.10");
            return value;
        }
        value.push_str(&format!(",refcount_bits={}", self.refcount_bits));
        if self.extended_l2 {
            value.push_str(",extended_l2=on");
        }
        if self.lazy_refcounts {
            value.push_str(",lazy_refcounts=on");
        }
        if self.is_encrypted {
            value.push_str(&format!(",{ENCRYPT}"));
        }
        value
    }

    /// The words that define the key of an encrypted image.
    pub fn objects(&self) -> Vec<String> {
        match self.is_encrypted {
            true => ["--object", SECRET].map(str::to_owned).into(),
            false => Vec::new(),
        }
    }

    /// The words that name an image.
    pub fn image(&self, address: &Address) -> Vec<String> {
        if !self.is_encrypted {
            return vec!["-f".into(), "qcow2".into(), address.name()];
        }
        let mut words = self.objects();
        words.extend(["--image-opts".into(), self.image_opts(address)]);
        words
    }

    /// The words that name two images to `compare`.
    pub fn two_images(&self, [first, second]: [&Address; 2]) -> Vec<String> {
        let mut words = self.image(first);
        match self.is_encrypted {
            true => words.push(self.image_opts(second)),
            false => {
                words.splice(0..0, ["-F".to_owned(), "qcow2".to_owned()]);
                words.push(second.name());
            }
        }
        words
    }

    fn image_opts(&self, address: &Address) -> String {
        let file = address.options();
        format!("driver=qcow2,encrypt.key-secret=s,{file}")
    }
}

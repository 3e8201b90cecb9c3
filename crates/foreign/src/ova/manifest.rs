//! Manifests: a line `SHA256(disk.vmdk)= 0123...` for each member. Pure.

use std::collections::HashSet;

use sha1::Sha1;
use sha2::{Digest, Sha256, Sha384, Sha512};

/// A function that sums are made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Version 1 of the specification asks for this one.
    Sha1,
    /// Version 2 asks for this one.
    Sha256,
    /// Seen in the wild.
    Sha384,
    /// Seen in the wild.
    Sha512,
}

impl Algorithm {
    /// The name in manifests.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Sha1 => "SHA1",
            Algorithm::Sha256 => "SHA256",
            Algorithm::Sha384 => "SHA384",
            Algorithm::Sha512 => "SHA512",
        }
    }

    fn named(name: &str) -> Option<Algorithm> {
        let known = [
            Algorithm::Sha1,
            Algorithm::Sha256,
            Algorithm::Sha384,
            Algorithm::Sha512,
        ];
        let name = name.replace('-', "");
        known
            .into_iter()
            .find(|algorithm| algorithm.name().eq_ignore_ascii_case(&name))
    }

    fn sum_bytes(self) -> usize {
        match self {
            Algorithm::Sha1 => 20,
            Algorithm::Sha256 => 32,
            Algorithm::Sha384 => 48,
            Algorithm::Sha512 => 64,
        }
    }
}

/// What a manifest says of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sum {
    /// The member's name.
    pub member: String,
    /// What the sum was made with.
    pub algorithm: Algorithm,
    /// The sum.
    pub value: Vec<u8>,
}

/// A manifest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Manifest {
    /// Its sums, in its order.
    pub sums: Vec<Sum>,
    /// Numbers of the lines that are none, whose function is not known, or that come twice, from 1.
    pub unreadable_lines: Vec<usize>,
}

impl Manifest {
    /// Takes a manifest apart. It has as many entries as it has lines.
    pub fn decode(bytes: &[u8]) -> Manifest {
        let (mut manifest, mut seen) = (Manifest::default(), HashSet::new());
        for (number, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
            let line = line.trim_ascii();
            if line.is_empty() {
                continue;
            }
            match std::str::from_utf8(line).ok().and_then(sum) {
                // A second one could say something else.
                Some(sum) if seen.insert((sum.member.clone(), sum.algorithm)) => {
                    manifest.sums.push(sum);
                }
                _ => manifest.unreadable_lines.push(number + 1),
            }
        }
        manifest
    }

    /// The sums of a member.
    pub fn sums_of(&self, member: &str) -> impl Iterator<Item = &Sum> {
        self.sums.iter().filter(move |sum| sum.member == member)
    }
}

fn sum(line: &str) -> Option<Sum> {
    let (head, value) = line.rsplit_once('=')?;
    let (algorithm, member) = head.trim_end().strip_suffix(')')?.split_once('(')?;
    let algorithm = Algorithm::named(algorithm.trim())?;
    let value = from_hex(value.trim())?;
    (value.len() == algorithm.sum_bytes()).then(|| Sum {
        member: super::plain_name(member).to_owned(),
        algorithm,
        value,
    })
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16);
    let pairs = text.as_bytes().chunks(2);
    pairs
        .map(|pair| match pair {
            [high, low] => u8::try_from(digit(high)? * 16 + digit(low)?).ok(),
            _ => None,
        })
        .collect()
}

/// A sum that is being made.
pub(super) enum Summing {
    Sha1(Sha1),
    Sha256(Sha256),
    Sha384(Sha384),
    Sha512(Sha512),
}

impl Summing {
    pub(super) fn new(algorithm: Algorithm) -> Summing {
        match algorithm {
            Algorithm::Sha1 => Summing::Sha1(Sha1::new()),
            Algorithm::Sha256 => Summing::Sha256(Sha256::new()),
            Algorithm::Sha384 => Summing::Sha384(Sha384::new()),
            Algorithm::Sha512 => Summing::Sha512(Sha512::new()),
        }
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        match self {
            Summing::Sha1(digest) => digest.update(bytes),
            Summing::Sha256(digest) => digest.update(bytes),
            Summing::Sha384(digest) => digest.update(bytes),
            Summing::Sha512(digest) => digest.update(bytes),
        }
    }

    pub(super) fn value(self) -> Vec<u8> {
        match self {
            Summing::Sha1(digest) => digest.finalize().to_vec(),
            Summing::Sha256(digest) => digest.finalize().to_vec(),
            Summing::Sha384(digest) => digest.finalize().to_vec(),
            Summing::Sha512(digest) => digest.finalize().to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lines_of_all_who_write_them_are_read() {
        let ones = "01".repeat(20);
        let twos = "AB".repeat(32);
        let text = format!(
            "SHA1(m.ovf)= {ones}\r\n\nSHA256 (a (1).vmdk) = {twos}\nMD5(x)= 00\nSHA1(y)= 00\nsha-256(./z)={twos}"
        );
        let manifest = Manifest::decode(text.as_bytes());
        let members: Vec<_> = manifest.sums.iter().map(|sum| &*sum.member).collect();
        assert_eq!(members, ["m.ovf", "a (1).vmdk", "z"]);
        assert_eq!(manifest.sums[0].value, [1; 20]);
        assert_eq!(manifest.sums[1].algorithm, Algorithm::Sha256);
        assert_eq!(manifest.unreadable_lines, [4, 5]);
        assert_eq!(manifest.sums_of("z").count(), 1);
    }

    #[test]
    fn sums_are_those_of_the_standard() {
        let of = |algorithm| {
            let mut summing = Summing::new(algorithm);
            summing.add(b"a");
            summing.add(b"bc");
            summing.value()
        };
        assert_eq!(of(Algorithm::Sha1)[..4], [0xa9, 0x99, 0x3e, 0x36]);
        assert_eq!(of(Algorithm::Sha256)[..4], [0xba, 0x78, 0x16, 0xbf]);
        assert_eq!(of(Algorithm::Sha384)[..4], [0xcb, 0x00, 0x75, 0x3f]);
        assert_eq!(of(Algorithm::Sha512)[..4], [0xdd, 0xaf, 0x35, 0xa1]);
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_manifest(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            Manifest::decode(&bytes);
        }

        #[test]
        fn any_lines_give_a_manifest(text in "((SHA1|SHA256)?[(]?[a-z()=]{0,5}[)]?= ?[0-9a-f]{0,70}\n){0,4}") {
            Manifest::decode(text.as_bytes());
        }
    }
}

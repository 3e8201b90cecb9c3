//! What is below a directory, file by file.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;

/// Files by their paths.
pub type Listing = BTreeMap<Vec<u8>, Node>;

/// A file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub mode: u32,
    pub owner: (u32, u32),
    pub links: u64,
    pub size_bytes: u64,
    pub modified: i64,
    pub device: u64,
    /// Of its content, or of where it leads.
    pub sum: u64,
}

/// A checksum of a file of `size_bytes` that `read` reads at an offset.
pub fn sum(size_bytes: u64, mut read: impl FnMut(u64, &mut [u8]) -> usize) -> u64 {
    let mut sum = Fnv::default();
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while at < size_bytes {
        let len = read(at, &mut buffer);
        assert!(len > 0, "it ends after {at} bytes");
        sum.add(&buffer[..len]);
        at += len as u64;
    }
    sum.0
}

/// A checksum of a link's target.
pub fn sum_of_bytes(bytes: &[u8]) -> u64 {
    let mut sum = Fnv::default();
    sum.add(bytes);
    sum.0
}

/// As FNV-1a, of eight bytes at a time where there are so many.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Fnv {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    fn add(&mut self, bytes: &[u8]) {
        for word in bytes.chunks(8) {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            self.0 = (self.0 ^ u64::from_le_bytes(padded)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// What the kernel shows below a directory.
pub fn of_directory(root: &Path) -> Listing {
    let mut listing = Listing::new();
    add(root, &mut Vec::new(), &mut listing);
    listing
}

fn add(path: &Path, name: &mut Vec<u8>, listing: &mut Listing) {
    let metadata = fs::symlink_metadata(path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
    let kind = metadata.file_type();
    let is_device = kind.is_char_device() || kind.is_block_device();
    let sum = if kind.is_file() {
        let file = File::open(path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        sum(metadata.len(), |at, buffer| {
            file.read_at(buffer, at).expect("readable")
        })
    } else if kind.is_symlink() {
        sum_of_bytes(
            fs::read_link(path)
                .expect("a target")
                .as_os_str()
                .as_bytes(),
        )
    } else {
        0
    };
    let node = Node {
        mode: metadata.mode(),
        owner: (metadata.uid(), metadata.gid()),
        links: metadata.nlink(),
        size_bytes: if kind.is_dir() { 0 } else { metadata.len() },
        modified: metadata.mtime(),
        device: if is_device { metadata.rdev() } else { 0 },
        sum,
    };
    listing.insert(name.clone(), node);
    if !kind.is_dir() {
        return;
    }
    for entry in fs::read_dir(path).expect("a directory") {
        let own_name = entry.expect("an entry").file_name();
        let len = name.len();
        name.push(b'/');
        name.extend(own_name.as_bytes());
        add(&path.join(&own_name), name, listing);
        name.truncate(len);
    }
}

/// Panics at the first difference, in paths that `is_compared`.
pub fn compare(
    what: &str,
    found: &Listing,
    expected: &Listing,
    same: impl Fn(&Node, &Node) -> bool,
) {
    let missing = expected.keys().find(|path| !found.contains_key(*path));
    assert_eq!(
        missing.map(|path| OsStr::from_bytes(path)),
        None,
        "{what}: missing"
    );
    for (path, node) in found {
        let path_shown = OsStr::from_bytes(path);
        let Some(expected) = expected.get(path) else {
            panic!("{what}: {path_shown:?} should not be there");
        };
        assert!(
            same(node, expected),
            "{what}: {path_shown:?}: {node:?}, not {expected:?}"
        );
    }
}

//! ext2, ext3 and ext4 as mke2fs makes them, beside the tree that they were made from.

mod common;

use common::images::{self, EXT};
use common::listing::{self, Node};
use vellum_files::{Contents, detect};

/// Root is a directory that mke2fs makes, with lost+found in it.
fn without_root(mut listing: listing::Listing) -> listing::Listing {
    listing.remove(&b""[..]);
    listing.retain(|path, _| !path.starts_with(b"/lost+found"));
    listing
}

fn is_same(found: &Node, expected: &Node) -> bool {
    let mut expected = expected.clone();
    // The kernel's own form of a device's number has 64 bits.
    let (major, minor) = (expected.device >> 8 & 0xfff, expected.device & 0xff);
    expected.device = major << 8 | minor;
    // mke2fs keeps 32 bits of a time.
    expected.modified = expected.modified as i32 as i64;
    *found == expected
}

#[test]
fn every_kind_shows_the_tree_that_it_was_made_from() {
    let folder = tempfile::tempdir().expect("a folder");
    let tree = folder.path().join("tree");
    images::tree(&tree);
    let expected = without_root(listing::of_directory(&tree));
    let image = folder.path().join("image");
    for (number, (name, ..)) in EXT.iter().enumerate() {
        images::ext(number, &tree, &image);
        let volume = common::source(&image);
        let found = detect(&volume).expect("readable");
        assert_eq!(found.contents, Contents::Ext(&name[..4]), "{name}");
        assert_eq!(found.label.as_deref(), Some("a label"));
        let files = vellum_files::open(volume, found.contents).expect("sound");
        assert_eq!(files.remarks(), [""; 0]);
        let found = without_root(common::listing(&*files));
        listing::compare(name, &found, &expected, is_same);
    }
}

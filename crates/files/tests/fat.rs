//! FAT as mkfs.vfat and mtools make it, beside what was copied there.

mod common;

use common::images;
use common::listing::{self, Listing, Node};
use vellum_files::{Contents, ROOT, detect};

fn is_same(found: &Node, expected: &Node) -> bool {
    let is_near = found.modified.abs_diff(expected.modified) <= 2;
    let is_directory = found.mode & 0o170_000 == 0o040_000;
    (found.size_bytes, found.sum) == (expected.size_bytes, expected.sum)
        && found.mode & 0o170_000 == expected.mode & 0o170_000
        && (is_near || is_directory)
}

fn without_root(mut listing: Listing) -> Listing {
    listing.remove(&b""[..]);
    listing
}

#[test]
fn every_width_shows_what_was_copied_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = folder.path().join("image");
    for (options, mebibytes) in [
        (&["-F", "12", "-s", "8"][..], 12),
        (&["-F", "16"], 40),
        (&["-F", "16", "-S", "4096"], 300),
        (&["-F", "32", "-s", "1"], 40),
        (&["-F", "32", "-s", "64", "-f", "1"], 2100),
    ] {
        let tree = images::fat(options, mebibytes, folder.path(), &image);
        let expected = without_root(listing::of_directory(&tree));
        let volume = common::source(&image);
        let found = detect(&volume).expect("readable");
        assert_eq!(found.contents, Contents::Fat);
        assert_eq!(found.label.as_deref(), Some("A LABEL"), "{options:?}");
        let files = vellum_files::open(volume, found.contents).expect("sound");
        let found = without_root(common::listing(&*files));
        listing::compare(&format!("{options:?}"), &found, &expected, is_same);
        let loud = files.lookup(ROOT, "BIG".as_bytes()).expect("sound");
        assert_eq!(loud, files.lookup(ROOT, b"big").expect("sound"));
        assert!(loud.is_some());
    }
}

//! Common to tests: images, and what is in them as the library shows it.
#![allow(dead_code)]

pub mod images;
pub mod listing;
pub mod xfs_image;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use listing::{Listing, Node, sum, sum_of_bytes};
use vellum_files::{FileSystem, Id, Kind, ROOT, ReadAt, Source};

/// An image that is a file.
pub struct Image(pub File);

impl ReadAt for Image {
    fn len_bytes(&self) -> u64 {
        self.0.metadata().expect("a file").len()
    }

    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(bytes, offset_bytes)
    }
}

pub fn source(path: &Path) -> Source {
    Source::new(Arc::new(Image(File::open(path).expect("an image"))))
}

/// What the library shows.
pub fn listing(files: &dyn FileSystem) -> Listing {
    let mut listing = Listing::new();
    add(files, ROOT, &mut Vec::new(), &mut listing);
    listing
}

fn add(files: &dyn FileSystem, id: Id, name: &mut Vec<u8>, listing: &mut Listing) {
    let shown = String::from_utf8_lossy(name).into_owned();
    let found = files
        .attributes(id)
        .unwrap_or_else(|e| panic!("{shown}: {e}"));
    let node = Node {
        mode: found.kind.mode() | found.permissions,
        owner: found.owner.unwrap_or_default(),
        links: found.links.into(),
        size_bytes: if found.kind == Kind::Directory {
            0
        } else {
            found.size_bytes
        },
        modified: found.modified.seconds,
        device: found.device.into(),
        sum: match found.kind {
            Kind::File => sum(found.size_bytes, |at, buffer| {
                let read = files.read(id, at, buffer);
                read.unwrap_or_else(|e| panic!("{shown} at {at}: {e}"))
            }),
            Kind::Link => sum_of_bytes(&files.read_link(id).expect("a target")),
            _ => 0,
        },
    };
    assert!(
        listing.insert(name.clone(), node).is_none(),
        "{shown} is there twice"
    );
    if found.kind != Kind::Directory {
        return;
    }
    for (own_name, child) in names(files, id) {
        assert_eq!(
            files.lookup(id, &own_name).expect("sound"),
            Some(child),
            "{own_name:?}"
        );
        let len = name.len();
        name.push(b'/');
        name.extend(own_name);
        add(files, child, name, listing);
        name.truncate(len);
    }
}

/// The names in a directory, a few at a time.
pub fn names(files: &dyn FileSystem, id: Id) -> Vec<(Vec<u8>, Id)> {
    let mut names = Vec::new();
    let mut from = 0;
    loop {
        let before = names.len();
        let listed = files.list(id, from, &mut |entry| {
            if names.len() == before + 7 {
                return false;
            }
            names.push((entry.name.to_owned(), entry.id));
            from = entry.next;
            true
        });
        listed.expect("sound");
        if names.len() == before {
            return names;
        }
    }
}

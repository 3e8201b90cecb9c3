//! The names of the snapshots and bitmaps of an image, for completions.

use std::path::Path;

use vellum::qcow2::info::ImageInfo;
use vellum_io::lane;
use vellum_storage::{FileOptions, FileStorage, Locks};

/// Which names are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Snapshot,
    Bitmap,
}

/// Names, and what is known about each.
#[derive(Debug, Default)]
pub struct Names(pub Vec<(String, String)>);

/// The names in the first of some words that is a qcow2 image; none if there is none.
pub fn of_image(kind: Kind, words: &[String]) -> Names {
    let mut images = words.iter().filter_map(|word| look(word));
    let Some(info) = images.next() else {
        return Names::default();
    };
    let names = match kind {
        Kind::Snapshot => info
            .snapshots
            .iter()
            .map(|snapshot| (snapshot.name.clone(), format!("snapshot {}", snapshot.id)))
            .collect(),
        Kind::Bitmap => info
            .bitmaps
            .iter()
            .map(|bitmap| {
                (
                    bitmap.name.clone(),
                    format!("{} bytes a bit", bitmap.granularity_bytes),
                )
            })
            .collect(),
    };
    let steers = |name: &str| name.chars().any(char::is_control);
    Names(names).without(|(name, _)| name.is_empty() || steers(name))
}

impl Names {
    fn without(mut self, unwanted: impl Fn(&(String, String)) -> bool) -> Names {
        self.0.retain(|name| !unwanted(name));
        self
    }
}

/// What an image says of itself. Whoever writes it meanwhile is not disturbed, and at worst a
/// name is missing.
fn look(path: &str) -> Option<ImageInfo> {
    let path = Path::new(path);
    if !std::fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let options = FileOptions::default()
        .read_only(true)
        // A completion disturbs nobody, and what it reads is only shown.
        .locks(Locks::Unlocked);
    lane::block_on(async {
        let storage = FileStorage::open(path, &options).ok()?;
        ImageInfo::read(storage).await.ok()
    })
}

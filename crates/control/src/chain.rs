//! Finding images in a backing chain by the names that people give them, as QEMU does.

use std::path::PathBuf;
use std::sync::Arc;

use vellum::{BlockDevice, Result};

use crate::{ImageSpec, Options, Source, filename};

/// The image `name` in the chain below `top`, and how far below it stands.
pub fn find_backing(top: &Arc<dyn BlockDevice>, name: &str) -> Option<(u32, Arc<dyn BlockDevice>)> {
    let mut above = top.clone();
    let mut depth = 0;
    while let Some(below) = above.backing() {
        depth += 1;
        if is_named(&above, &below, name) {
            return Some((depth, below));
        }
        above = below;
    }
    None
}

/// Whether `name` means the image `below`, seen from the one above it.
fn is_named(above: &Arc<dyn BlockDevice>, below: &Arc<dyn BlockDevice>, name: &str) -> bool {
    let header = above.as_qcow2().map(|image| image.header());
    let stored = header.and_then(|header| header.backing_file_text().map(|t| t.into_owned()));
    let Some(stored) = stored else {
        // Options put it there: only its own name is known.
        return below.info().name == name;
    };
    let image = above.info().name;
    let full = filename::resolve(&image, &stored).ok();
    if filename::protocol(name).is_some() || filename::protocol(&stored).is_some() {
        return stored == name || full.as_deref() == Some(name);
    }
    let wanted = filename::resolve(&image, name).ok();
    match (wanted.and_then(real_path), full.and_then(real_path)) {
        (Some(wanted), Some(full)) => wanted == full,
        _ => false,
    }
}

fn real_path(name: String) -> Option<PathBuf> {
    std::fs::canonicalize(filename::local_path(&name).ok()?).ok()
}

/// What opens the image of a device in a chain once more, by itself.
pub fn spec_of(device: &Arc<dyn BlockDevice>) -> ImageSpec {
    let info = device.info();
    let mut options = Options::new();
    options.set_text("driver", info.format);
    options.set_text("file.filename", info.name.clone());
    ImageSpec {
        added: Options::new(),
        source: Source::Options(options),
        format: None,
        name: info.name,
    }
}

/// The name of a new backing file of `image` as seen from here.
///
/// # Errors
/// In QEMU's words, where a relative name means nothing.
pub fn resolve_backing(image: &Arc<dyn BlockDevice>, name: &str) -> Result<String> {
    filename::resolve(&image.info().name, name)
}

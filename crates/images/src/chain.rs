//! Finding images in a backing chain by the names that people give them, as QEMU does.

use std::path::PathBuf;
use std::sync::Arc;

use vellum::{BlockDevice, Error, ErrorKind, Result};
use vellum_graph::node::backing_name;
use vellum_options::{ImageSpec, Options, Source, filename};

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
    let Some(stored) = backing_name::named(&**above).name else {
        // Options put it there: only its own name is known, and that says less than the options
        // where a server is asked (which one, as whom).
        return filename::protocol(name).is_none() && below.info().name == name;
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

/// The backing file of `image`, or of one below, that `name` by itself leads to. Where options say
/// what the chain of `image` is made of, that cannot be told.
///
/// # Errors
/// For a `spec` of `image` without meaning.
pub fn find_backing_by_name_alone(
    spec: &ImageSpec,
    image: &Arc<dyn BlockDevice>,
    name: &str,
) -> Result<Option<Arc<dyn BlockDevice>>> {
    let mut options = spec.options()?;
    let is_told = options.contains("backing") || !options.take_group("backing").is_empty();
    let mut above = image.clone();
    while let (false, Some(below)) = (is_told, above.backing()) {
        if is_named(&above, &below, name) {
            return Ok(Some(below));
        }
        let stored = backing_name::named(&*above).name.unwrap_or_default();
        if stored.starts_with("json:") {
            break;
        }
        above = below;
    }
    Ok(None)
}

fn real_path(name: String) -> Option<PathBuf> {
    std::fs::canonicalize(filename::local_path(&name).ok()?).ok()
}

/// What opens the image `depth` below `top` once more, by itself: with the options that
/// the user gave for it, or else by the name that the image above it holds.
///
/// # Errors
/// Where neither says it: the image above names none, or the user has put a node there.
pub fn spec_below(spec: &ImageSpec, top: &Arc<dyn BlockDevice>, depth: u32) -> Result<ImageSpec> {
    let mut found = spec.clone();
    let mut above = top.clone();
    for _ in 0..depth {
        let mut options = found.options()?;
        let given = options.take_group("backing");
        let (Some(below), false) = (above.backing(), options.contains("backing")) else {
            return Err(cannot_reopen(&above));
        };
        let whole = given.keys().any(names_a_file);
        found = match whole {
            true => ImageSpec {
                source: Source::Options(given),
                format: None,
                added: Options::new(),
                name: below.info().name,
            },
            false => named_in(&above)?.with_options(given),
        };
        above = below;
    }
    Ok(found)
}

fn names_a_file(key: &str) -> bool {
    key == "file" || key.starts_with("file.")
}

/// The backing file that an image names.
fn named_in(image: &Arc<dyn BlockDevice>) -> Result<ImageSpec> {
    let named = backing_name::named(&**image);
    let name = named.name.ok_or_else(|| cannot_reopen(image))?;
    let full = filename::resolve(&image.info().name, &name)?;
    Ok(ImageSpec::filename(full).with_format(named.format.as_deref()))
}

fn cannot_reopen(above: &Arc<dyn BlockDevice>) -> Error {
    let message = "cannot open the backing file once more, for writing";
    Error::new(ErrorKind::Unsupported, "open", message).target(above.info().name)
}

/// The name of a new backing file of `image` as seen from here.
///
/// # Errors
/// In QEMU's words, where a relative name means nothing.
pub fn resolve_backing(image: &Arc<dyn BlockDevice>, name: &str) -> Result<String> {
    filename::resolve(&image.info().name, name)
}

//! `raw`: the bytes of a file as they are, or a part of them.

use std::sync::Arc;

use vellum::{BlockDevice, Raw, RawOptions, Result};

use crate::node::driver::{DriverFacts, NamingKind};
use crate::node::errors::{invalid, refuse_unknown_of_format};
use crate::open::context::FormatOpening;
use crate::probed_raw::ProbedRaw;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&["offset", "size"]],
    follows_size: true,
    changes_file: true,
    changeable: &["offset", "size"],
    ..DriverFacts::named("raw").with_naming(NamingKind::Format, &[&["offset", "size"]], &["file"])
};

pub(crate) async fn open(opening: FormatOpening) -> Result<Arc<dyn BlockDevice>> {
    let FormatOpening {
        file,
        mut options,
        is_probed,
        ..
    } = opening;
    let flags = &opening.around.flags;
    let raw = RawOptions::default()
        .offset_bytes(options.take_size("offset")?.unwrap_or(0))
        .size_bytes(options.take_size("size")?)
        .read_only(!flags.writable);
    refuse_unknown_of_format(&options, "raw")?;
    let name = file.name().to_owned();
    let file_bytes = file.len_bytes()?.next_multiple_of(512);
    if raw.offset_bytes > file_bytes {
        return Err(invalid(format!(
            "Offset ({}) cannot be greater than size of the containing file ({file_bytes})",
            raw.offset_bytes
        )));
    }
    let device = Raw::open(file, raw)?;
    if !(is_probed && flags.writable) {
        return Ok(device);
    }
    (flags.warn)(&format!(
        "WARNING: Image format was not specified for '{name}' and probing guessed raw.\n         \
         Automatically detecting the format is dangerous for raw images, write operations on \
         block 0 will be restricted.\n         Specify the 'raw' format explicitly to remove the \
         restrictions.\n"
    ));
    Ok(ProbedRaw::new(device))
}

//! Finds the format of a file that is named without one.

use vellum::{Buffer, Buffers, Error, ErrorKind, Result, Storage};

use crate::open::context::{DriverTable, NamedFormat};
use crate::probe::{PROBE_BYTES, Probed, probe};

/// The format of a file by its first bytes.
pub(crate) async fn probe_file(file: &dyn Storage, drivers: DriverTable) -> Result<NamedFormat> {
    let len_bytes = file.len_bytes()?.min(PROBE_BYTES as u64) as usize;
    let start = file
        .read(0, Buffers::from_iter([Buffer::zeroed(len_bytes)]))
        .await
        .map_err(|error| {
            error.context("open", "Could not read image for determining its format")
        })?;
    let name = match probe(&Buffer::join_all(start)) {
        Probed::Qcow2 => "qcow2",
        Probed::Luks => "luks",
        // Nothing at its beginning tells such an image.
        Probed::Raw if file.name().ends_with(".dmg") => "dmg",
        Probed::Raw => "raw",
        Probed::Foreign(name) => {
            return drivers.find_format(name).map_err(|_| {
                Error::new(
                    ErrorKind::Unsupported,
                    "open",
                    format!(
                        "The image looks like {name}, a format that this version does not have"
                    ),
                )
                .target(file.name())
            });
        }
    };
    drivers.find_format(name)
}

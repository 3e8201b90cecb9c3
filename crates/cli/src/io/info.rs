//! `info`: prints the image's driver and what is particular to its format.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum::qcow2::AsQcow2;
use vellum_format::features::{Autoclear, Compatible, Incompatible};
use vellum_format::header::Header;
use vellum_options::filename;

use super::image::Image;
use super::outcome::{Failed, Outcome};
use super::print::byte_text;
use crate::report;

/// Prints what is known about an image.
pub fn print(image: &Image) -> Outcome {
    let info = image.device().info();
    if matches!(info.format, "null-co" | "null-aio") {
        // Its name as a format and as a protocol, and there is no more to say.
        report::print(format_args!(
            "format name: {0}\nformat name: {0}\n",
            info.format
        ));
        return Err(Failed);
    }
    if !knows_more(image.device()) {
        report::print_line(format_args!("format name: {}", info.format));
        return Err(Failed);
    }
    let header = image.device().as_qcow2().map(|qcow2| qcow2.header());
    let vm_state = header.as_deref().map_or(0, vm_state_offset_bytes);
    let mut text = format!(
        "format name: {}\ncluster size: {}\nvm state offset: {}\n",
        info.format,
        byte_text(info.cluster_size_bytes.unwrap_or(0) as f64),
        byte_text(vm_state as f64),
    );
    if let Some(header) = header {
        text.push_str("Format specific information:\n");
        for (name, value) in specifics(&header) {
            text.push_str(&format!("    {name}: {value}\n"));
        }
    }
    report::print(text);
    Ok(())
}

/// Whether there is more to say than a format's name: formats without clusters ask what
/// they stand on, and not all of that answers.
fn knows_more(device: &Arc<dyn BlockDevice>) -> bool {
    let is_silent = |name: &str| {
        let protocol = filename::protocol(name);
        let silent = ["http", "nbd", "null-"];
        protocol.is_some_and(|it| silent.iter().any(|name| it.starts_with(name)))
    };
    device.as_qcow2().is_some() || !is_silent(&device.info().name)
}

/// The VM state lies behind the last byte that the L1 table needs for the guest.
fn vm_state_offset_bytes(header: &Header) -> u64 {
    let geometry = header.geometry();
    let per_table_bytes = geometry
        .l2_entries()
        .saturating_mul(geometry.cluster_size_bytes());
    header
        .guest_size_bytes()
        .div_ceil(per_table_bytes)
        .saturating_mul(per_table_bytes)
}

fn specifics(header: &Header) -> Vec<(&'static str, String)> {
    let geometry = header.geometry();
    let old = header.version < 3;
    let mut lines = vec![
        ("compat", if old { "0.10" } else { "1.1" }.to_owned()),
        (
            "compression type",
            header.compression_type.name().to_owned(),
        ),
    ];
    if !old {
        lines.push((
            "lazy refcounts",
            header
                .compatible
                .contains(Compatible::LAZY_REFCOUNTS)
                .to_string(),
        ));
    }
    lines.push(("refcount bits", geometry.refcount_bits().to_string()));
    if let Some(name) = header.external_data_file() {
        lines.push(("data file", String::from_utf8_lossy(name).into_owned()));
        lines.push((
            "data file raw",
            header
                .autoclear
                .contains(Autoclear::RAW_EXTERNAL_DATA)
                .to_string(),
        ));
    }
    if !old {
        lines.push((
            "corrupt",
            header
                .incompatible
                .contains(Incompatible::CORRUPT)
                .to_string(),
        ));
        lines.push(("extended l2", geometry.extended_l2.to_string()));
    }
    lines
}

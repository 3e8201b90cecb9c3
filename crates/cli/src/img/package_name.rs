//! Names of packages of virtual machines (OVA) where an image is to be named.
//!
//! Programs that are called as QEMU's see a file of bytes, as QEMU's do.

use vellum_options::{ImageSpec, Source, ova_name};

use crate::report;

/// The path of the package that a name without a format means as a whole, if it does.
pub fn package(name: &str, format: Option<&str>) -> Option<String> {
    let is_meant = format.is_none() && report::is_own_name(report::program());
    is_meant.then(|| ova_name::named_package(name)).flatten()
}

/// An image that may be named by the package that it lies in.
pub fn disk_in(spec: ImageSpec) -> ImageSpec {
    match package(&spec.name, spec.format.as_deref()) {
        Some(package) => ImageSpec {
            source: Source::Filename(ova_name::name_of_only_disk(&package)),
            ..spec
        },
        None => spec,
    }
}

//! What an open image says that it stands on.

use std::borrow::Cow;

use vellum::BlockDevice;
use vellum::qcow2::AsQcow2;

use crate::node::foreign_image;

/// The names of a backing file and its format, as an image has them.
#[derive(Debug, Default)]
pub struct Named {
    /// As it is written in the image: relative to the image, a URL, or `json:{}`.
    pub name: Option<String>,
    /// `None` where the image leaves it to probing.
    pub format: Option<String>,
}

/// What an open image says that it stands on.
pub fn named(image: &dyn BlockDevice) -> Named {
    if let Some(qcow2) = image.as_qcow2() {
        let header = qcow2.header();
        return Named {
            name: header.backing_file_text().map(Cow::into_owned),
            format: header.backing_format().map(Cow::into_owned),
        };
    }
    let backing = foreign_image::facts(image).and_then(|facts| facts.backing.clone());
    backing.map_or_else(Named::default, |backing| Named {
        name: Some(backing.name),
        format: backing.format,
    })
}

/// Whether an open image says that it stands on what is called `name`, or on nothing.
pub(crate) fn is_named(image: &dyn BlockDevice, name: Option<&str>) -> bool {
    match image.as_qcow2() {
        Some(qcow2) => qcow2.header().backing_file_text().as_deref() == name,
        None => named(image).name.as_deref() == name,
    }
}

//! Parallels' images.

use std::sync::Arc;

use vellum::{BlockDevice, Error, ErrorKind, Result};
use vellum_foreign::parallels::{self, CreateOptions};
use vellum_options::create_options::{OptionDescription, OptionType, SIZE, option};

use super::format::{Creation, ForeignFormat, New, Opening, QmpKind, no_extents, qmp};

pub(crate) const FORMAT: ForeignFormat = ForeignFormat {
    name: "parallels",
    open: |opening| Box::pin(open(opening)),
    create: Some(Creation {
        options: OPTIONS,
        validate: |_| Ok(()),
        extents: no_extents,
        fill: |new| Box::pin(fill(new)),
        qmp: &[qmp("cluster-size", "cluster_size", QmpKind::Size)],
    }),
    check: Some(|file, fix, _| Box::pin(parallels::repair(file, fix))),
    repairs: true,
    options: &[&["prealloc-size", "prealloc-mode"]],
    compresses: false,
    has_backing: false,
};

const OPTIONS: &[OptionDescription] = &[
    SIZE,
    option(
        "cluster_size",
        OptionType::Size,
        "Parallels image cluster size",
        Some("1048576"),
    ),
];

async fn fill(new: New<'_>) -> Result<()> {
    let mut options = CreateOptions::default().size_bytes(new.size_bytes());
    if let Some(bytes) = new.settings.integer("cluster_size") {
        if new.exact && !bytes.is_multiple_of(512) {
            let message = "Cluster size must be a multiple of 512 bytes";
            return Err(Error::new(ErrorKind::InvalidArgument, "create", message));
        }
        options = options.cluster_size_bytes(bytes);
    }
    parallels::create(new.file, &options).await
}

async fn open(mut opening: Opening) -> Result<Arc<dyn BlockDevice>> {
    // Space is made as it is needed: how QEMU makes it ahead changes nothing here.
    opening.options.take_size("prealloc-size")?;
    let mode = opening.options.take_text("prealloc-mode")?;
    if let Some(other) = mode.filter(|mode| !matches!(&**mode, "falloc" | "truncate")) {
        let message = format!("invalid parameter value: {other}");
        return Err(Error::new(ErrorKind::InvalidArgument, "open", message));
    }
    opening.no_more_options()?;
    // A check looks at the image as it is.
    let read_only = opening.read_only() || opening.around.flags.for_check;
    Ok(parallels::open(opening.file, read_only).await?)
}

//! VirtualBox's images.

use std::sync::Arc;

use vellum::{BlockDevice, Result};
use vellum_foreign::vdi::{self, CreateOptions};
use vellum_options::create_options::{CreateSettings, OptionDescription, OptionType, SIZE, option};

use super::format::{Creation, ForeignFormat, Opening, QmpKind, no_extents, qmp};

pub(crate) const FORMAT: ForeignFormat = ForeignFormat {
    name: "vdi",
    open: |opening| Box::pin(open(opening)),
    create: Some(Creation {
        options: OPTIONS,
        validate: |settings| {
            vdi::Header::new(settings.integer("size").unwrap_or(0), false).map(drop)
        },
        extents: no_extents,
        fill: |new| Box::pin(async move { vdi::create(new.file, &options(new.settings)).await }),
        qmp: &[qmp(
            "preallocation",
            "preallocation",
            QmpKind::Choice(&["off", "metadata"]),
        )],
    }),
    check: Some(|file, _, _| Box::pin(vdi::check(&**file))),
    repairs: false,
    options: &[],
    compresses: false,
    has_backing: false,
};

const OPTIONS: &[OptionDescription] = &[
    SIZE,
    option(
        "static",
        OptionType::Bool,
        "VDI static (pre-allocated) image",
        Some("off"),
    ),
];

fn options(settings: &CreateSettings) -> CreateOptions {
    CreateOptions::default()
        .size_bytes(settings.integer("size").unwrap_or(0))
        .is_static(settings.bool("static") || settings.text("preallocation") == Some("metadata"))
}

async fn open(mut opening: Opening) -> Result<Arc<dyn BlockDevice>> {
    opening.backing(None).await?;
    Ok(vdi::open(opening.file.clone(), opening.read_only()).await?)
}

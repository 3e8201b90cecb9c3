//! QED.

use std::sync::Arc;

use vellum::{BlockDevice, Error, ErrorKind, Result};
use vellum_foreign::BackingName;
use vellum_foreign::qed::{self, CreateOptions};
use vellum_options::create_options::{
    BACKING_FILE, BACKING_FORMAT, CreateSettings, OptionDescription, OptionType, SIZE, option,
};

use super::format::{Creation, ForeignFormat, New, Opening, QmpKind, no_extents, qmp};

pub(crate) const FORMAT: ForeignFormat = ForeignFormat {
    name: "qed",
    open: |opening| Box::pin(open(opening)),
    create: Some(Creation {
        options: OPTIONS,
        validate: |settings| options(settings).map(drop),
        extents: no_extents,
        fill: |new| Box::pin(fill(new)),
        qmp: &[
            qmp("backing-file", "backing_file", QmpKind::Text),
            qmp("backing-fmt", "backing_fmt", QmpKind::Text),
            qmp("cluster-size", "cluster_size", QmpKind::Size),
            qmp("table-size", "table_size", QmpKind::Size),
        ],
    }),
    check: Some(|file, fix, _| Box::pin(qed::repair(file, fix))),
    repairs: true,
    options: &[],
    compresses: false,
    has_backing: true,
};

const OPTIONS: &[OptionDescription] = &[
    SIZE,
    BACKING_FILE,
    BACKING_FORMAT,
    option(
        "cluster_size",
        OptionType::Size,
        "Cluster size (in bytes)",
        Some("65536"),
    ),
    option(
        "table_size",
        OptionType::Size,
        "L1/L2 table size (in clusters)",
        None,
    ),
];

fn options(settings: &CreateSettings) -> Result<CreateOptions> {
    let defaults = CreateOptions::default();
    let number = |name, default| match settings.integer(name) {
        None => Ok(default),
        Some(value) => u32::try_from(value).map_err(|_| {
            let message = format!("QED {} is too large", name.replace('_', " "));
            Error::new(ErrorKind::InvalidArgument, "create", message)
        }),
    };
    let backing = settings.text("backing_file").map(|name| BackingName {
        name: name.to_owned(),
        format: settings.text("backing_fmt").map(str::to_owned),
    });
    Ok(CreateOptions::default()
        .size_bytes(settings.integer("size").unwrap_or(0))
        .cluster_size_bytes(number("cluster_size", defaults.cluster_size_bytes)?)
        .table_size_clusters(number("table_size", defaults.table_size_clusters)?)
        .backing(backing))
}

async fn fill(new: New<'_>) -> Result<()> {
    qed::create(new.file, &options(new.settings)?).await
}

async fn open(mut opening: Opening) -> Result<Arc<dyn BlockDevice>> {
    let facts = qed::facts(&opening.file).await?;
    let backing = opening.backing(facts.backing).await?;
    // A check looks at the image as it is.
    let read_only = opening.read_only() || opening.around.flags.for_check;
    Ok(qed::open(opening.file.clone(), backing, read_only).await?)
}

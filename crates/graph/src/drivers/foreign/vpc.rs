//! VPC (VHD).

use std::sync::Arc;

use vellum::{BlockDevice, Result};
use vellum_foreign::vpc::{self, CreateOptions, OpenOptions, SizeCalculation, Subformat};
use vellum_options::create_options::{CreateSettings, OptionDescription, OptionType, SIZE, option};

use super::format::{
    Creation, ForeignFormat, New, Opening, QmpKind, no_extents, not_accepted, qmp,
};

pub(crate) const FORMAT: ForeignFormat = ForeignFormat {
    name: "vpc",
    open: |opening| Box::pin(open(opening)),
    create: Some(Creation {
        options: OPTIONS,
        validate: |settings| options(settings)?.rounded_bytes().map(drop),
        extents: no_extents,
        fill: |new| Box::pin(fill(new)),
        qmp: &[
            qmp(
                "subformat",
                "subformat",
                QmpKind::Choice(&["dynamic", "fixed"]),
            ),
            qmp("force-size", "force_size", QmpKind::Switch),
        ],
    }),
    check: None,
    repairs: false,
    options: &[&[SIZE_CALCULATION]],
    compresses: false,
    has_backing: true,
};

const SIZE_CALCULATION: &str = "force_size_calc";

const OPTIONS: &[OptionDescription] = &[
    SIZE,
    option(
        "subformat",
        OptionType::Text,
        "Type of virtual hard disk format. Supported formats are {dynamic (default) | fixed} ",
        None,
    ),
    option(
        "force_size",
        OptionType::Bool,
        "Force disk size calculation to use the actual size specified, rather than using the nearest \
         CHS-based calculation",
        None,
    ),
];

fn options(settings: &CreateSettings) -> Result<CreateOptions> {
    let subformat = match settings.text("subformat") {
        None => Subformat::default(),
        Some(name) => Subformat::parse(name).ok_or_else(|| not_accepted("subformat", name))?,
    };
    Ok(CreateOptions::default()
        .size_bytes(settings.integer("size").unwrap_or(0))
        .subformat(subformat)
        .force_size(settings.bool("force_size")))
}

async fn fill(new: New<'_>) -> Result<()> {
    let options = options(new.settings)?.exact_size(new.exact);
    vpc::create(new.file, &options).await
}

async fn open(mut opening: Opening) -> Result<Arc<dyn BlockDevice>> {
    let calculation = match opening.options.take_text(SIZE_CALCULATION)? {
        None => SizeCalculation::default(),
        Some(name) => SizeCalculation::parse(&name)?,
    };
    let options = OpenOptions::default()
        .read_only(opening.read_only())
        .size_calculation(calculation);
    let parent = vpc::parent(opening.file.clone(), options).await?;
    let backing = opening
        .backing(parent.and_then(|parent| parent.backing_name()))
        .await?;
    Ok(vpc::open(opening.file.clone(), backing, options).await?)
}

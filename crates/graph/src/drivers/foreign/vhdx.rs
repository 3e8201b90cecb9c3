//! VHDX.

use std::sync::Arc;

use vellum::{BlockDevice, Result};
use vellum_foreign::vhdx::{self, CreateOptions, OpenOptions, Subformat};
use vellum_options::create_options::{CreateSettings, OptionDescription, OptionType, option};

use super::format::{
    Creation, ForeignFormat, New, Opening, QmpKind, no_extents, not_accepted, qmp,
};

pub(crate) const FORMAT: ForeignFormat = ForeignFormat {
    name: "vhdx",
    open: |opening| Box::pin(open(opening)),
    create: Some(Creation {
        options: OPTIONS,
        validate: |settings| options(settings).map(drop),
        extents: no_extents,
        fill: |new| Box::pin(fill(new)),
        qmp: &[
            qmp("log-size", "log_size", QmpKind::Size),
            qmp("block-size", "block_size", QmpKind::Size),
            qmp(
                "subformat",
                "subformat",
                QmpKind::Choice(&["dynamic", "fixed"]),
            ),
            qmp("block-state-zero", "block_state_zero", QmpKind::Switch),
        ],
    }),
    check: Some(|file, fix, _| Box::pin(vhdx::check(file, fix))),
    repairs: true,
    options: &[],
    compresses: false,
    has_backing: true,
};

const OPTIONS: &[OptionDescription] = &[
    option(
        "size",
        OptionType::Size,
        "Virtual disk size; max of 64TB.",
        None,
    ),
    option(
        "log_size",
        OptionType::Size,
        "Log size; min 1MB.",
        Some("1048576"),
    ),
    option(
        "block_size",
        OptionType::Size,
        "Block Size; min 1MB, max 256MB. 0 means auto-calculate based on image size.",
        Some("0"),
    ),
    option(
        "subformat",
        OptionType::Text,
        "VHDX format type, can be either 'dynamic' or 'fixed'. Default is 'dynamic'.",
        None,
    ),
    option(
        "block_state_zero",
        OptionType::Bool,
        "Force use of payload blocks of type 'ZERO'. Non-standard, but default.  Do not set to 'off' \
         when using 'qemu-img convert' with subformat=dynamic.",
        None,
    ),
];

fn options(settings: &CreateSettings) -> Result<CreateOptions> {
    let defaults = CreateOptions::default();
    let subformat = match settings.text("subformat") {
        None => defaults.subformat,
        Some(name) => Subformat::parse(name).ok_or_else(|| not_accepted("subformat", name))?,
    };
    let zero = !settings.is_given("block_state_zero") || settings.bool("block_state_zero");
    Ok(CreateOptions::default()
        .size_bytes(settings.integer("size").unwrap_or(0))
        .log_size_bytes(
            settings
                .integer("log_size")
                .unwrap_or(defaults.log_size_bytes),
        )
        .block_size_bytes(settings.integer("block_size").unwrap_or(0))
        .subformat(subformat)
        .block_state_zero(zero))
}

async fn fill(new: New<'_>) -> Result<()> {
    let options = options(new.settings)?.exact_sizes(new.exact);
    vhdx::create(new.file, &options).await
}

async fn open(mut opening: Opening) -> Result<Arc<dyn BlockDevice>> {
    let options = OpenOptions::default()
        .read_only(opening.read_only())
        .for_check(opening.around.flags.for_check);
    let parent = vhdx::parent(opening.file.clone(), options).await?;
    let backing = opening
        .backing(parent.and_then(|parent| parent.backing_name()))
        .await?;
    Ok(vhdx::open(opening.file.clone(), backing, options).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_zero_unless_that_is_off() {
        for (text, zero) in [
            ("", true),
            ("block_state_zero=on", true),
            ("block_state_zero=off", false),
        ] {
            let mut settings = CreateSettings::of(OPTIONS.to_vec());
            settings.parse(text).unwrap();
            let expected = CreateOptions::default().block_state_zero(zero);
            assert_eq!(options(&settings).unwrap(), expected, "{text}");
        }
    }
}

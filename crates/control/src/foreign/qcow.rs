//! The first version of qcow.

use std::sync::Arc;

use vellum::{BlockDevice, Error, ErrorKind, Result};
use vellum_foreign::qcow::{self, CreateOptions};

use super::{Creation, ForeignFormat, New, Opening, QmpKind};
use crate::create_options::{
    BACKING_FILE, CreateSettings, OptionDescription, OptionType, SIZE, option,
};

pub(super) const FORMAT: ForeignFormat = ForeignFormat {
    name: "qcow",
    open: |opening| Box::pin(open(opening)),
    create: Some(Creation {
        options: OPTIONS,
        validate,
        extents: super::no_extents,
        fill: |new| Box::pin(fill(new)),
        qmp: &[super::qmp("backing-file", "backing_file", QmpKind::Text)],
    }),
    check: None,
    repairs: false,
    options: &["encrypt.format", "encrypt.key-secret"],
    compresses: true,
    has_backing: true,
};

const OPTIONS: &[OptionDescription] = &[
    SIZE,
    BACKING_FILE,
    option(
        "backing_fmt",
        OptionType::Text,
        "Format of the backing image",
        None,
    ),
    option(
        "encryption",
        OptionType::Bool,
        "Encrypt the image with format 'aes'. (Deprecated in favor of encrypt.format=aes)",
        None,
    ),
    option(
        "encrypt.format",
        OptionType::Text,
        "Encrypt the image, format choices: 'aes'",
        None,
    ),
    option(
        "encrypt.key-secret",
        OptionType::Text,
        "ID of the secret that provides the AES encryption key",
        None,
    ),
];

fn validate(settings: &CreateSettings) -> Result<()> {
    if settings.bool("encryption") || settings.text("encrypt.format").is_some() {
        let message = "encrypted qcow images are not made: use qcow2 with encrypt.format=luks";
        return Err(Error::new(ErrorKind::Unsupported, "create", message));
    }
    Ok(())
}

async fn fill(new: New<'_>) -> Result<()> {
    let options = CreateOptions::default()
        .size_bytes(new.size_bytes())
        .backing_file(new.settings.text("backing_file").map(str::to_owned));
    qcow::create(new.file, &options).await
}

async fn open(mut opening: Opening) -> Result<Arc<dyn BlockDevice>> {
    let facts = qcow::facts(&opening.file).await?;
    let backing = opening.backing(facts.backing).await?;
    Ok(qcow::open(opening.file.clone(), backing, opening.read_only()).await?)
}

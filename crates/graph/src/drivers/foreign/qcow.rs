//! The first version of qcow.

use std::sync::Arc;

use vellum::{BlockDevice, Result};
use vellum_foreign::qcow::{self, CreateOptions, OpenOptions};
use vellum_options::create_options::{BACKING_FILE, OptionDescription, OptionType, SIZE, option};

use crate::encryption;

use super::format::{Creation, ForeignFormat, New, Opening, QmpKind, no_extents, qmp};

pub(crate) const FORMAT: ForeignFormat = ForeignFormat {
    name: "qcow",
    open: |opening| Box::pin(open(opening)),
    create: Some(Creation {
        options: OPTIONS,
        validate: |settings| encryption::for_qcow(settings).map(drop),
        extents: no_extents,
        fill: |new| Box::pin(fill(new)),
        qmp: &[
            qmp("backing-file", "backing_file", QmpKind::Text),
            qmp("encrypt", "encrypt.format", QmpKind::Encryption),
        ],
    }),
    check: None,
    repairs: false,
    options: &[&["encrypt.format", "encrypt.key-secret"]],
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

async fn fill(new: New<'_>) -> Result<()> {
    let options = CreateOptions::default()
        .size_bytes(new.size_bytes())
        .backing_file(new.settings.text("backing_file").map(str::to_owned))
        .is_encrypted(encryption::for_qcow(new.settings)?);
    qcow::create(new.file, &options).await
}

async fn open(mut opening: Opening) -> Result<Arc<dyn BlockDevice>> {
    let unlocking = encryption::take(&mut opening.options, &opening.around.flags)?;
    let facts = qcow::facts(&opening.file).await?;
    let backing = opening.backing(facts.backing).await?;
    let options = OpenOptions::default()
        .read_only(opening.read_only())
        .unlocking(unlocking);
    Ok(qcow::open(opening.file, backing, options).await?)
}

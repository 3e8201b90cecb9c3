//! `luks`: the payload of a volume, whose header may stand apart from it.

use std::sync::Arc;

use vellum::luks::{LuksDevice, LuksOptions};
use vellum::{BlockDevice, Result, Storage};
use vellum_options::{OpenFlags, Options};

use crate::encryption::needed_passphrase;
use crate::node::driver::{DriverFacts, NamingKind};
use crate::node::errors::refuse_unknown_of_format;
use crate::node::file_node::FileUse;
use crate::node::origin::Role;
use crate::open::context::{FormatOpening, OpenContext};
use crate::open::node::optional_child;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&["key-secret", "header"]],
    changes_file: true,
    ..DriverFacts::named("luks").with_naming(
        NamingKind::Format,
        &[&["key-secret"]],
        &["header", "file"],
    )
};

/// Opens the volume in `file` with what is left of a node's options.
pub(crate) async fn open(opening: FormatOpening) -> Result<Arc<dyn BlockDevice>> {
    let FormatOpening {
        file, mut options, ..
    } = opening;
    let around = &opening.around;
    let header = take_header(&mut options, around).await?;
    let id = options.take_text("key-secret")?;
    refuse_unknown_of_format(&options, "luks")?;
    let passphrase = needed_passphrase(id, &around.flags)?;
    let options = LuksOptions::default()
        .read_only(!around.flags.writable)
        .passphrase(passphrase)
        .header(header)
        .metadata_only(around.flags.metadata_only || around.flags.no_data);
    Ok(LuksDevice::open(file, options).await?)
}

/// What holds a header that stands apart from its payload (`header`). It is only read.
async fn take_header(
    options: &mut Options,
    around: &OpenContext,
) -> Result<Option<Arc<dyn Storage>>> {
    let around = OpenContext {
        flags: OpenFlags {
            writable: false,
            ..around.flags.clone()
        },
        ..around.clone()
    };
    let header = optional_child(options, "header", Role::Protocol, &around).await?;
    match header {
        Some(header) => header
            .into_storage(&around.flags, FileUse::Format)
            .await
            .map(Some),
        None => Ok(None),
    }
}

//! Images of other programs' formats: the file, and those that belong to it.

use std::sync::Arc;

use vellum::{Preallocation, Result, Storage};
use vellum_graph::foreign::{Creation, New};
use vellum_graph::node::file_policy::FilePolicy;
use vellum_graph::open::OpenContext;
use vellum_options::create_options::CreateSettings;
use vellum_options::{OpenFlags, filename};
use vellum_storage::lock::Permissions;

use super::{Target, create_file, invalid, preallocation};

/// Makes the files that an image has beside the one that it is named by.
async fn make_extents(
    creation: &Creation,
    settings: &CreateSettings,
    name: &str,
) -> Result<Vec<Arc<dyn Storage>>> {
    let mut extents: Vec<Arc<dyn Storage>> = Vec::new();
    for path in (creation.extents)(settings, name)? {
        let file = create_file(&filename::local_path(&path)?).await?;
        file.set_permissions_patiently(Permissions::WRITER).await?;
        extents.push(file);
    }
    Ok(extents)
}

/// Makes an image of a format of other programs.
pub(super) async fn make(name: &str, creation: &Creation, settings: &CreateSettings) -> Result<()> {
    (creation.validate)(settings)?;
    if preallocation(settings)? == Preallocation::Metadata {
        return Err(invalid("Unsupported preallocation mode: metadata"));
    }
    let target = Target::open(name, settings).await?;
    let fill = async |target: &Target| {
        let extents = make_extents(creation, settings, name).await?;
        let new = New {
            file: &target.storage(),
            extents: &extents,
            settings,
            around: &OpenContext::alone(OpenFlags::default(), FilePolicy::Any),
            exact: false,
        };
        (creation.fill)(new).await
    };
    target.fill(name, fill).await
}

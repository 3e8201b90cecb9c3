//! `preallocate`: makes a file longer by large steps.

use std::sync::Arc;

use vellum::Result;
use vellum_options::Options;
use vellum_storage::nodes::preallocate::{PreallocateOptions, PreallocateStorage};

use crate::node::driver::{DriverFacts, NamingKind};
use crate::node::errors::{invalid, refuse_unknown};
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::node::origin::Role;
use crate::open::context::OpenContext;
use crate::open::node::child;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&["prealloc-align", "prealloc-size"]],
    follows_size: true,
    changes_file: true,
    changeable: &["prealloc-align", "prealloc-size"],
    ..DriverFacts::filter("preallocate").with_naming(NamingKind::Filter, &[], &["file"])
};

const SECTOR_BYTES: u64 = 512;

pub(super) async fn open(
    mut options: Options,
    _common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    let file = child(&mut options, "file", Role::Protocol, &around).await?;
    let defaults = PreallocateOptions::default();
    let take = |options: &mut Options, key: &str, default: u64| {
        let bytes = options.take_size(key)?.unwrap_or(default);
        match bytes.is_multiple_of(SECTOR_BYTES) {
            true => Ok(bytes),
            false => Err(invalid(format!(
                "{key} parameter of preallocate filter is not aligned to {SECTOR_BYTES}"
            ))),
        }
    };
    let chosen = PreallocateOptions {
        align_bytes: take(&mut options, "prealloc-align", defaults.align_bytes)?.max(SECTOR_BYTES),
        size_bytes: take(&mut options, "prealloc-size", defaults.size_bytes)?,
    };
    refuse_unknown(&options, "preallocate")?;
    if !file.writable {
        return Ok(OpenedNode {
            driver: FACTS,
            ..file
        });
    }
    let storage = PreallocateStorage::new(file.storage(), chosen)?;
    Ok(file.filter(FACTS, Arc::new(storage)))
}

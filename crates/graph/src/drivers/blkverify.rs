//! `blkverify`: an image and a raw copy that must agree.

use std::sync::Arc;

use vellum::Result;
use vellum_options::{Options, filename};
use vellum_storage::nodes::verify::VerifyStorage;

use crate::node::driver::{DriverFacts, NamingKind};
use crate::node::errors::refuse_unknown;
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::node::origin::Role;
use crate::open::context::OpenContext;
use crate::open::node::child;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    is_reopened: false,
    ..DriverFacts::filter("blkverify").with_naming(NamingKind::Protocol, &[], &["raw", "test"])
};

pub(super) async fn open(
    mut options: Options,
    _common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    // A name without a prefix is that of the image: the rest was said in options.
    if let Some(name) = options.take_text("filename")? {
        for (key, value) in filename::node_options(&name)?.iter() {
            options.set(&format!("test.file.{key}"), value.clone());
        }
    }
    let raw = child(&mut options, "raw", Role::Protocol, &around).await?;
    let test = child(&mut options, "test", Role::Image, &around).await?;
    refuse_unknown(&options, "blkverify")?;
    let storage = VerifyStorage::new(raw.storage(), test.storage(), around.flags.warn);
    let mut opened = test.filter(FACTS, Arc::new(storage));
    opened.files.extend(raw.files);
    Ok(opened)
}

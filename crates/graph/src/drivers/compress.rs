//! `compress`: what is written is compressed.

use vellum::qcow2::AsQcow2;
use vellum::{Error, ErrorKind, Result};
use vellum_options::Options;

use crate::compressing::Compressing;
use crate::node::driver::DriverFacts;
use crate::node::errors::refuse_unknown;
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::node::origin::Role;
use crate::open::context::OpenContext;
use crate::open::node::child;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    is_reopened: false,
    ..DriverFacts::filter("compress")
};

pub(super) async fn open(
    mut options: Options,
    _common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    let file = child(&mut options, "file", Role::Protocol, &around).await?;
    refuse_unknown(&options, "compress")?;
    let format = file.driver.name;
    let device = file.into_device(&around.flags).await?;
    if device.as_qcow2().is_none() {
        let message = format!("Compression is not supported for underlying format: {format}");
        return Err(Error::new(ErrorKind::Unsupported, "open", message));
    }
    Ok(OpenedNode::device(FACTS, Compressing::new(device)))
}

//! `compress`: what is written is compressed.

use vellum::qcow2::AsQcow2;
use vellum::{Error, ErrorKind, Result};
use vellum_options::Options;

use crate::compressing::Compressing;
use crate::file_node::CommonOptions;
use crate::graph::{OpenContext, OpenedNode, Role, child, refuse_unknown};

pub(super) async fn open(
    mut options: Options,
    _common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    let file = child(&mut options, "file", Role::Protocol, &around).await?;
    refuse_unknown(&options, "compress")?;
    let format = file.driver;
    let device = file.into_device(&around.flags).await?;
    if device.as_qcow2().is_none() {
        let message = format!("Compression is not supported for underlying format: {format}");
        return Err(Error::new(ErrorKind::Unsupported, "open", message));
    }
    Ok(OpenedNode::device("compress", Compressing::new(device)))
}

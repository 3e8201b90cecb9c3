//! `cache` in a build without servers: every use is refused.

use vellum::Result;
use vellum_options::Options;

use super::http;
use crate::file_node::CommonOptions;
use crate::graph::{OpenContext, OpenedNode};

pub(super) async fn open(
    options: Options,
    common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    http::open("cache", options, common, around).await
}

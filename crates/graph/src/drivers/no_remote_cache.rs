//! `cache` in a build without servers: every use is refused.

use vellum::Result;
use vellum_options::Options;

use crate::node::driver::DriverFacts;
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::open::context::OpenContext;

use super::http;

/// The driver, whatever it is called: nothing is known of its options.
pub(super) const FACTS: DriverFacts = DriverFacts::named("cache");

pub(super) async fn open(
    options: Options,
    common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    http::open("cache", options, common, around).await
}

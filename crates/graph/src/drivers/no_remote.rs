//! The drivers of files on other machines in a build without them: every use is refused.

use vellum::{Error, ErrorKind, Result};
use vellum_options::Options;

use crate::node::driver::DriverFacts;
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::open::context::OpenContext;

/// The driver, whatever it is called: nothing is known of its options.
pub(super) const FACTS: DriverFacts = DriverFacts::named("http");

/// Options of stores that are not there.
#[cfg(not(feature = "s3"))]
pub(super) const OPTIONS: &[&str] = &[];

pub(super) async fn open(
    driver: &'static str,
    _options: Options,
    _common: CommonOptions,
    _around: OpenContext,
) -> Result<OpenedNode> {
    let feature = match driver {
        "http" | "https" | "cache" => "remote",
        "rbd" => "rbd",
        "ssh" => "ssh",
        _ => "s3",
    };
    let message = format!("The protocol '{driver}' requires a build with the feature '{feature}'");
    Err(Error::new(ErrorKind::Unsupported, "open", message))
}

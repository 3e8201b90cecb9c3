//! `null-co`, `null-aio`: what is written is gone.

use std::sync::Arc;
use std::time::Duration;

use vellum::Result;
use vellum_options::Options;
use vellum_storage::nodes::null::{NullOptions, NullStorage};

use crate::node::driver::{DriverFacts, NamingKind};
use crate::node::errors::{invalid, refuse_unknown};
use crate::node::file_node::CommonOptions;
use crate::node::opened::{NodeKind, OpenedNode};
use crate::open::context::OpenContext;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&["size", "latency-ns", "read-zeroes"]],

    ..DriverFacts::named("null-co").with_naming(NamingKind::Protocol, &[&["size"]], &[])
};

pub(super) async fn open(
    driver: &'static str,
    mut options: Options,
    common: CommonOptions,
    _around: OpenContext,
) -> Result<OpenedNode> {
    // The name may stand there; it says nothing more.
    options.take_text("filename")?;
    let size_bytes = options.take_size("size")?;
    let latency_ns = options.take_number("latency-ns")?.unwrap_or(0);
    let read_zeroes = options.take_bool("read-zeroes")?.unwrap_or(false);
    refuse_unknown(&options, driver)?;
    if i64::try_from(latency_ns).is_err() {
        return Err(invalid("latency-ns is invalid"));
    }
    let defaults = NullOptions::default();
    let storage = NullStorage::new(
        format!("{driver}://"),
        NullOptions {
            size_bytes: size_bytes.unwrap_or(defaults.size_bytes),
            latency: Duration::from_nanos(latency_ns),
            read_zeroes,
            read_only: !common.writable,
        },
    );
    Ok(OpenedNode {
        driver: FACTS.called(driver),
        kind: NodeKind::Storage(Arc::new(storage)),
        filtered: None,
        files: Vec::new(),
        writable: common.writable,
    })
}

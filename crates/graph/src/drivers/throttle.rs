//! `throttle`: requests keep the limits of a [group](crate::throttle_groups).

use std::sync::Arc;

use vellum::Result;
use vellum_options::Options;
use vellum_storage::nodes::throttle::ThrottleStorage;

use crate::node::driver::{DriverFacts, NamingKind};
use crate::node::errors::{invalid, refuse_unknown};
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::node::origin::Role;
use crate::open::context::OpenContext;
use crate::open::node::exchangeable_child;
use crate::throttle_groups;

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&["throttle-group"]],
    changes_file: true,
    changeable: &["throttle-group"],
    ..DriverFacts::filter("throttle").with_naming(
        NamingKind::Filter,
        &[&["throttle-group"]],
        &["file"],
    )
};

pub(super) async fn open(
    mut options: Options,
    _common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    let name = options.take_text("throttle-group")?;
    let file = exchangeable_child(&mut options, "file", Role::Protocol, &around).await?;
    refuse_unknown(&options, "throttle")?;
    let Some(name) = name else {
        // The monitor looks at the options before the driver does.
        return Err(invalid(match around.names_all() {
            true => "Parameter 'throttle-group' is missing",
            false => "Please specify a throttle group",
        }));
    };
    let group = throttle_groups::find(&name)?;
    let storage = Arc::new(ThrottleStorage::new(file.storage(), group));
    let node = around.place.parent.as_deref().unwrap_or_default();
    throttle_groups::note(node, &storage);
    Ok(file.filter(FACTS, storage))
}

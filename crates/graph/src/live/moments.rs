//! What nodes keep of the time since they were made, while they are opened anew.

use std::sync::Arc;

use vellum_jobs::live::{CopyBeforeWrite, Moment};

use crate::live::nodes::Nodes;
use crate::node::opened::NodeKind;
use crate::node::place::NodePlace;

impl Nodes {
    /// What a node keeps of the moment at which it was made, where it does. Its users are held up.
    pub(crate) async fn moment_of(&self, name: &str, kind: &NodeKind) -> Option<Arc<Moment>> {
        let is_filter = {
            let state = self.lock();
            state.nodes.get(name)?.opened.driver.name == "copy-before-write"
        };
        let (true, NodeKind::Device(device)) = (is_filter, kind) else {
            return None;
        };
        let filter: &CopyBeforeWrite = device.format_device()?.downcast_ref()?;
        Some(Arc::new(filter.moment().await))
    }

    /// What the node whose parts are opened at `place` kept of its moment before, if it is opened anew.
    pub(crate) fn moment(&self, place: &NodePlace) -> Option<Arc<Moment>> {
        let state = self.lock();
        state.nodes.get(place.parent.as_deref()?)?.moment.clone()
    }
}

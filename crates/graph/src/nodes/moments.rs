//! What nodes keep of the time since they were made, while they are opened anew.

use std::sync::Arc;

use vellum::Result;
use vellum_jobs::live::{CopyBeforeWrite, Moment};

use super::named::busy;
use super::{MADE_UP, NamedNode, Nodes};
use crate::graph::NodeKind;
use crate::open::Ancestry;

/// Drivers of nodes that are not the same once their options are opened a second time.
const WITH_A_PAST: [&str; 2] = ["blklogwrites", "copy-before-write"];

impl Nodes {
    /// What a node keeps of the moment at which it was made, where it does. Its users are held up.
    pub(super) async fn moment_of(&self, name: &str, kind: &NodeKind) -> Option<Arc<Moment>> {
        let is_filter = {
            let named = self.lock();
            named.nodes.get(name)?.opened.driver == "copy-before-write"
        };
        let (true, NodeKind::Device(device)) = (is_filter, kind) else {
            return None;
        };
        let filter: &CopyBeforeWrite = device.format_device()?.downcast_ref()?;
        Some(Arc::new(filter.moment().await))
    }

    /// What the node whose parts are opened at `place` kept of its moment before, if it is opened anew.
    pub(crate) fn moment(&self, place: &Ancestry) -> Option<Arc<Moment>> {
        let named = self.lock();
        named.nodes.get(place.parent.as_deref()?)?.moment.clone()
    }
}

impl NamedNode {
    /// Refuses to open a node anew with what only it knows, if that would begin a second time.
    pub(super) fn check_past_below(&self, name: &str) -> Result<()> {
        let below = self.uses.by(name);
        for one in below.filter(|one| one.node.starts_with(MADE_UP)) {
            let driver = self.nodes.get(&one.node).map(|node| node.opened.driver);
            if let Some(driver) = driver.filter(|driver| WITH_A_PAST.contains(driver)) {
                let why = format!("the '{driver}' node below it has no name to be kept by");
                return busy(name, Some(why));
            }
            self.check_past_below(&one.node)?;
        }
        Ok(())
    }
}

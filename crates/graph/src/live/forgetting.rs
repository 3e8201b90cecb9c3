//! What is forgotten of nodes that are gone.

use crate::live::state::GraphState;

impl GraphState {
    /// Forgets a node that is gone: whom users would be led from there too, unless a file of disks names it
    /// and may bring it back.
    pub(crate) fn forget_leads_of(&mut self, gone: &str) {
        if !self.configured.contains(gone) {
            self.leads.take(gone);
        }
        let (leads, nodes) = (&mut self.leads, &self.nodes);
        leads.forget(gone, &|name| nodes.contains_key(name));
    }
}

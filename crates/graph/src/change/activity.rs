//! Nodes become active or inactive under their users.

use vellum::Result;

use crate::change::graph_change::GraphChange;
use crate::change::reopen_changes::ReopenChanges;
use crate::live::nodes::Nodes;
use crate::node::errors::{invalid, unknown_node};

impl Nodes {
    /// Makes nodes active or inactive, all at one moment: such as
    /// [`Nodes::affected_by_activity`] tells. Users go on with them.
    ///
    /// # Errors
    /// If a job works on one of them, one cannot be opened anew, or is locked by somebody: then
    /// all are as they were.
    pub async fn set_activity(&self, names: &[String], active: bool) -> Result<()> {
        if names.is_empty() {
            return Ok(());
        }
        self.activity_change(names, active)?.apply(self).await
    }

    /// What [`Nodes::set_activity`] does.
    ///
    /// # Errors
    /// If a job works on one of the nodes.
    pub(crate) fn activity_change(&self, names: &[String], active: bool) -> Result<GraphChange> {
        self.check_activity_change(names)?;
        let state = self.lock();
        // Others are opened by those above them.
        let own = names.iter().filter(|name| !state.is_inside_another(name));
        let change = ReopenChanges {
            active: Some(active),
            ..ReopenChanges::default()
        };
        let changes = own.map(|name| (name.clone(), change.clone()));
        Ok(GraphChange::reopening(changes.collect()))
    }

    /// Refuses nodes that cannot change.
    fn check_activity_change(&self, names: &[String]) -> Result<()> {
        let state = self.lock();
        for name in state.standing_directly(names) {
            state.check_no_job(&name)?;
        }
        for name in names {
            let node = state.nodes.get(name).ok_or_else(|| unknown_node(name))?;
            if node.is_filter {
                return Err(invalid(format!(
                    "Node '{name}' is busy: it is the filter of a job"
                )));
            }
        }
        Ok(())
    }
}

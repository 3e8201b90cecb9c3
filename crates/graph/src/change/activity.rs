//! Nodes become active or inactive under their users.

use vellum::Result;

use crate::change::renewed::ReopenChanges;
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
        self.check_activity_change(names)?;
        let changes = self.activity_changes(names, active);
        self.renew_all(changes).await
    }

    /// Opens a node anew, and makes it and others inactive with that.
    pub(crate) async fn renew_with_activity(
        &self,
        name: &str,
        change: ReopenChanges,
        inactivated: &[String],
    ) -> Result<()> {
        self.check_activity_change(inactivated)?;
        let mut changes = self.activity_changes(inactivated, false);
        match changes.iter_mut().find(|(changed, _)| changed == name) {
            Some((_, with)) => {
                *with = ReopenChanges {
                    active: with.active,
                    ..change
                };
            }
            None => changes.push((name.to_owned(), change)),
        }
        self.renew_all(changes).await
    }

    /// Refuses nodes that cannot change.
    fn check_activity_change(&self, names: &[String]) -> Result<()> {
        let named = self.lock();
        for name in named.standing_directly(names) {
            named.check_no_job(&name)?;
        }
        for name in names {
            let node = named.nodes.get(name).ok_or_else(|| unknown_node(name))?;
            if node.is_filter {
                return Err(invalid(format!(
                    "Node '{name}' is busy: it is the filter of a job"
                )));
            }
        }
        Ok(())
    }

    /// What changes of nodes that are not opened by those above them.
    fn activity_changes(&self, names: &[String], active: bool) -> Vec<(String, ReopenChanges)> {
        let named = self.lock();
        let own = names.iter().filter(|name| !named.is_inside_another(name));
        let change = ReopenChanges {
            active: Some(active),
            ..ReopenChanges::default()
        };
        own.map(|name| (name.clone(), change.clone())).collect()
    }
}

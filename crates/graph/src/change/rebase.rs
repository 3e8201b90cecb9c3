//! What images and filters stand on, in their headers and in the graph: what commits and streams change in the end.
//!
//! Invariant: an image shows the same before and after, and its users are held up in between.

use vellum::Result;

use crate::change::graph_change::GraphChange;
use crate::live::nodes::Nodes;

impl Nodes {
    /// Has an image stand on the node `below`, or on nothing, from now on: in its header,
    /// where that names a backing file, and in the graph. It must show the same there,
    /// durably.
    /// `file` is how the header names the new one; otherwise by its own name.
    ///
    /// # Errors
    /// If the header cannot be changed, or the image be led there. All is as it was then.
    pub async fn rebase(
        &self,
        name: &str,
        below: Option<&str>,
        file: Option<String>,
    ) -> Result<()> {
        self.lock().check_not_shared(name, None)?;
        let change = GraphChange {
            header: Some(self.naming_in_header(name, below, file)?),
            relinked: self.relinking(name, "backing", below).into_iter().collect(),
            ..GraphChange::default()
        };
        change.apply(self).await
    }

    /// As [`Nodes::rebase`], of an image that stands on filters, of which the lowest one stands on
    /// `below` from now on: they stay.
    ///
    /// # Errors
    /// If the header cannot be changed, or the filter cannot be led there. All is as it was then.
    pub async fn rebase_below(
        &self,
        (name, filter): (&str, &str),
        below: &str,
        file: Option<String>,
    ) -> Result<()> {
        let mut change = match self.relinking(filter, "file", Some(below)) {
            Some(link) => GraphChange {
                relinked: vec![link],
                ..GraphChange::default()
            },
            None => GraphChange::child(filter, "file", Some(below)),
        };
        change.header = Some(self.naming_in_header(name, Some(below), file)?);
        change.apply(self).await
    }

    /// Has a filter stand on an overlay of the node that it stands on, as it did before the daemon was
    /// started again: then nobody uses the filter yet. With `may_leave` also on what does not stand on
    /// that node any more. Whether it does now.
    ///
    /// # Errors
    /// If the overlay cannot be used.
    pub async fn lead_filter(&self, filter: &str, overlay: &str, may_leave: bool) -> Result<bool> {
        let is_filter = {
            let state = self.lock();
            let node = state.nodes.get(filter);
            node.is_some_and(|node| node.is_filter_driver())
        };
        let link = self.relinking(filter, "file", Some(overlay));
        let (Some(link), Some(below), true) = (link, self.child_of(filter, "file"), is_filter)
        else {
            return Ok(false);
        };
        let stands_on = self.contains(overlay) && self.chain(overlay).contains(&below);
        if overlay == below || !self.contains(overlay) || !(stands_on || may_leave) {
            return Ok(false);
        }
        let change = GraphChange {
            relinked: vec![link],
            ..GraphChange::default()
        };
        change.apply(self).await?;
        if stands_on {
            self.stop_writing(&below).await;
        }
        Ok(true)
    }
}

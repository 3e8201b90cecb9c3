//! What images stand on by their backing files, in their headers and in the graph: what commits and
//! streams change in the end.
//!
//! Invariant: an image shows the same before and after, and its users are held up in between.

use vellum::Result;
use vellum::nodes::{Drained, nothing};
use vellum::qcow2::{AsQcow2, BackingName};

use crate::change::renewed::ReopenChanges;
use crate::live::nodes::Nodes;
use crate::node::errors::invalid;
use crate::node::{backing_name, foreign_image};

impl Nodes {
    /// Has an image stand on the node `below`, or on nothing, from now on: in its header,
    /// where that names a backing file, and in the graph. It must show the same there,
    /// durably.
    /// `file` is how the header names the new one; otherwise by its own name.
    ///
    /// # Errors
    /// If the header cannot be changed. The graph is as it was then.
    pub async fn rebase(
        &self,
        name: &str,
        below: Option<&str>,
        file: Option<String>,
    ) -> Result<()> {
        // A read may have found that what it wants lies below, and not asked for it yet; so may
        // the rest of what is gathered. What is below afterwards does not have it any more.
        let _held = self.hold_linked(name).await;
        self.name_in_header(name, below, file).await?;
        self.stand_on_another(name, below).await
    }

    /// As [`Nodes::rebase`], of an image that stands on filters, of which the lowest one stands on
    /// `below` from now on: they stay.
    ///
    /// # Errors
    /// If the header cannot be changed, or the filter cannot be led there. The graph is as it was then.
    pub async fn rebase_below(
        &self,
        (name, filter): (&str, &str),
        below: &str,
        file: Option<String>,
    ) -> Result<()> {
        let _held = self.hold_linked(name).await;
        self.name_in_header(name, Some(below), file).await?;
        let id = {
            let named = self.lock();
            let used = named.uses.by_as(filter, "file");
            used.filter(|one| one.link.is_some()).map(|one| one.id)
        };
        match id {
            Some(id) => self.lead_link(id, filter, Some(below)).await,
            None => {
                self.renew(filter, &ReopenChanges::child("file", Some(below)))
                    .await
            }
        }
    }

    /// Has a filter stand on an overlay of the node that it stands on, as it did before the daemon was
    /// started again: then nobody uses the filter yet. With `may_leave` also on what does not stand on
    /// that node any more. Whether it does now.
    ///
    /// # Errors
    /// If the overlay cannot be used.
    pub async fn lead_filter(&self, filter: &str, overlay: &str, may_leave: bool) -> Result<bool> {
        let id = {
            let named = self.lock();
            let is_filter = named
                .nodes
                .get(filter)
                .is_some_and(|node| node.is_filter_driver());
            let used = named.uses.by_as(filter, "file");
            let used = used.filter(|one| is_filter && one.link.is_some());
            used.map(|one| (one.id, one.node.clone()))
        };
        let Some((id, below)) = id else {
            return Ok(false);
        };
        let stands_on = self.contains(overlay) && self.chain(overlay).contains(&below);
        if overlay == below || !self.contains(overlay) || !(stands_on || may_leave) {
            return Ok(false);
        }
        self.lead_link(id, filter, Some(overlay)).await?;
        if stands_on {
            self.stop_writing(&below).await;
        }
        Ok(true)
    }

    /// Has an image's header say that it stands on the node `below`, where it names something.
    async fn name_in_header(
        &self,
        name: &str,
        below: Option<&str>,
        file: Option<String>,
    ) -> Result<()> {
        let device = self.device(name)?;
        let backing = match below {
            None => None,
            Some(below) => {
                let own = self.as_backing(&self.skip_filters(below))?;
                let name = file.unwrap_or(own.name);
                Some(BackingName { name, ..own })
            }
        };
        match device.as_qcow2() {
            Some(image) if image.header().backing_file.is_some() => {
                image.set_backing_file(backing).await?;
            }
            // Else its header would go on naming what it does not stand on.
            None if backing_name::named(&*device).name.is_some() => {
                foreign_image::set_backing_file(&*device, backing).await?;
            }
            _ => device.flush().await?,
        }
        Ok(())
    }

    /// Has an image's header name another backing file, or none if `file` is empty. What it stands
    /// on stays as it is.
    ///
    /// # Errors
    /// If the image has no header, or that cannot be changed: then it is as it was.
    pub async fn rename_backing(&self, name: &str, file: &str) -> Result<()> {
        let device = self.device(name)?;
        let qcow2 = device.as_qcow2();
        if qcow2.is_none() && foreign_image::facts(&*device).is_none() {
            let format = device.info().format;
            return Err(invalid(format!(
                "Block format '{format}' does not name backing files"
            )));
        }
        let below = self.backing_of(name);
        let format = match below {
            Some(below) => self.device(&below)?.info().format,
            None => device.info().format,
        };
        let backing = (!file.is_empty()).then(|| BackingName {
            name: file.to_owned(),
            format: Some(format.to_owned()),
        });
        let _held = self.hold_linked(name).await;
        match qcow2 {
            Some(image) => image.set_backing_file(backing).await?,
            None => foreign_image::set_backing_file(&*device, backing).await?,
        }
        if let Some(node) = self.lock().nodes.get_mut(name) {
            // The name that it had was opened; this one need not lead to the same.
            node.backing_text = None;
        }
        Ok(())
    }

    /// Holds up those users of a node that can be held up.
    async fn hold_linked(&self, name: &str) -> Vec<Drained> {
        let _lifted = self.lift_limits(name);
        let links: Vec<_> = {
            let named = self.lock();
            let uses = named.uses.of(name);
            uses.filter_map(|one| one.link.clone()).collect()
        };
        let mut drained = Vec::with_capacity(links.len());
        for link in links {
            drained.push(link.drain().await);
        }
        drained
    }

    /// Exchanges what an image stands on by its backing file, if it stands on something. The
    /// image only reads that, so there is nothing to make durable, and its users are held up.
    pub(crate) async fn stand_on_another(&self, name: &str, below: Option<&str>) -> Result<()> {
        let id = {
            let mut named = self.lock();
            named.check_not_shared(name, None)?;
            named.stop_sharing(&[name.to_owned()]);
            let backing = named.uses.by_as(name, "backing");
            backing.filter(|one| one.link.is_some()).map(|one| one.id)
        };
        match id {
            Some(id) => self.lead_link(id, name, below).await,
            None => Ok(()),
        }
    }

    /// Has a use that a node makes of another one by a link lead to `below`, or to nothing; its
    /// requests are held up meanwhile.
    async fn lead_link(&self, id: u64, name: &str, below: Option<&str>) -> Result<()> {
        if let Some(below) = below {
            self.lock().check_led_one(id, below)?;
        }
        let target = match below {
            None => nothing()?,
            Some(below) => self.device(below)?,
        };
        let Some(link) = self.link_of(id) else {
            return Ok(());
        };
        let lifted = self.lift_limits(name);
        let drained = link.drain().await;
        drop(lifted);
        drained.set(target);
        let mut named = self.lock();
        match below {
            Some(below) => named.uses.lead(id, below),
            None => named.uses.remove(id),
        }
        Ok(())
    }
}

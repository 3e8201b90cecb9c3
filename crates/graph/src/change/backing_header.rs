//! What an image's header says that it stands on is changed, while the image is in use.

use vellum::Result;
use vellum::qcow2::{AsQcow2, BackingName};

use crate::live::nodes::Nodes;
use crate::node::errors::invalid;
use crate::node::{backing_name, foreign_image};

/// The backing file that an image's header is to name, or none.
#[derive(Debug)]
pub(crate) struct HeaderChange {
    pub(crate) image: String,
    pub(crate) backing: Option<BackingName>,
}

impl HeaderChange {
    /// Changes the header, durably; one that names nothing stays as it is, and what was written to the image is made
    /// durable. What the header named, if it is another one now.
    ///
    /// # Errors
    /// If the header cannot be changed: it is as it was then.
    pub(crate) async fn write(&self, nodes: &Nodes) -> Result<Option<HeaderChange>> {
        let device = nodes.device(&self.image)?;
        let old = backing_name::named(&*device);
        let Some(name) = old.name else {
            device.flush().await?;
            return Ok(None);
        };
        match device.as_qcow2() {
            Some(image) => image.set_backing_file(self.backing.clone()).await?,
            None => foreign_image::set_backing_file(&*device, self.backing.clone()).await?,
        }
        let format = old.format;
        Ok(Some(HeaderChange {
            image: self.image.clone(),
            backing: Some(BackingName { name, format }),
        }))
    }
}

impl Nodes {
    /// That an image's header is to name the node `below`, or nothing. `file` is how it names it; otherwise by the
    /// node's own name.
    ///
    /// # Errors
    /// If there is no such node.
    pub(crate) fn naming_in_header(
        &self,
        image: &str,
        below: Option<&str>,
        file: Option<String>,
    ) -> Result<HeaderChange> {
        let backing = match below {
            None => None,
            Some(below) => {
                let own = self.as_backing(&self.skip_filters(below))?;
                let name = file.unwrap_or(own.name);
                Some(BackingName { name, ..own })
            }
        };
        let image = image.to_owned();
        Ok(HeaderChange { image, backing })
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
}

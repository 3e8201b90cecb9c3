//! Targets that a command makes, or opens, for its job alone: `drive-mirror`, `drive-backup`.

use crate::create::{self, CreateRequest};
use crate::options::{Options, Scalar};
use crate::qmp::{Arguments, Failure};
use crate::{Nodes, filename};

/// What a target is to be.
#[derive(Debug)]
pub(super) struct NewTarget {
    pub(super) filename: String,
    pub(super) format: Option<String>,
    pub(super) node_name: Option<String>,
    /// The file is there, and stays as it is.
    pub(super) is_there: bool,
}

/// What a target stands on.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// What its header names; nothing, if it is made.
    Own,
    /// This node, if its format is one that stands on others.
    Usual(String),
    /// This node: the target is of no use without it.
    Needed(String),
    /// This node, once the job has ended: until then the target stands on nothing.
    Later(String),
}

impl Backing {
    fn node(&self) -> Option<&str> {
        match self {
            Backing::Own => None,
            Backing::Usual(node) | Backing::Needed(node) | Backing::Later(node) => Some(node),
        }
    }
}

impl NewTarget {
    /// Takes `format` and `mode`.
    pub(super) fn take(arguments: &mut Arguments, filename: &str) -> Result<NewTarget, Failure> {
        let modes = [("existing", true), ("absolute-paths", false)];
        Ok(NewTarget {
            filename: filename.to_owned(),
            format: arguments.text("format")?,
            node_name: None,
            is_there: arguments.choice("mode", &modes)?.unwrap_or(false),
        })
    }

    /// Makes the file if it is not there, of the size of the node `source` and of its format where
    /// none is given, and opens it. Returns the name of the node. `rest` are its options beside.
    pub(super) async fn open(
        &self,
        nodes: &Nodes,
        source: &str,
        backing: &Backing,
        rest: &[(&str, &str)],
    ) -> Result<String, Failure> {
        let format = match (&self.format, self.is_there) {
            (None, false) => Some(nodes.device(source)?.info().format.to_owned()),
            (format, _) => format.clone(),
        };
        if let (Some(format), false) = (&format, self.is_there) {
            self.make(nodes, source, format, backing.node()).await?;
        }
        let mut options = Options::default();
        for (key, value) in rest {
            options.set_text(key, *value);
        }
        if let Some(format) = &format {
            options.set_text("driver", &**format);
        }
        if let Some(name) = &self.node_name {
            options.set_text("node-name", &**name);
        }
        options.set_group("file", filename::node_options(&self.filename)?);
        let takes_backing = format.as_deref() == Some("qcow2");
        match backing {
            Backing::Needed(node) => options.set_text("backing", &**node),
            Backing::Usual(node) if takes_backing => options.set_text("backing", &**node),
            Backing::Later(_) => options.set("backing", Scalar::Null),
            Backing::Own if takes_backing && !self.is_there => {
                options.set("backing", Scalar::Null);
            }
            Backing::Own | Backing::Usual(_) => {}
        }
        Ok(nodes.add_unlisted(options).await?)
    }

    async fn make(
        &self,
        nodes: &Nodes,
        source: &str,
        format: &str,
        backing: Option<&str>,
    ) -> Result<(), Failure> {
        let below = match backing {
            Some(backing) => Some(nodes.as_backing(backing)?),
            None => None,
        };
        let request = CreateRequest {
            filename: self.filename.clone(),
            format: format.to_owned(),
            size_bytes: Some(nodes.device(source)?.size_bytes()),
            backing: below.as_ref().map(|below| below.name.clone()),
            backing_format: below.and_then(|below| below.format),
            unchecked_backing: true,
            ..CreateRequest::default()
        };
        let settings = create::prepare(&request).await?;
        Ok(create::make(&self.filename, format, &settings).await?)
    }
}

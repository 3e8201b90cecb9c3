//! Targets that a command makes, or opens, for its job alone: `drive-mirror`, `drive-backup`.

use crate::create::{self, CreateRequest};
use crate::nodes::NewNode;
use crate::open::Turns;
use crate::options::{Options, Scalar};
use crate::qmp::{Arguments, Failure};
use crate::{Nodes, filename};

/// What a target is to be.
#[derive(Debug, Clone)]
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
    /// none is given, and opens it. `rest` are its options beside.
    pub(super) async fn open(
        &self,
        (nodes, turns): (&Nodes, Turns),
        source: &str,
        backing: &Backing,
        rest: &[(&str, &str)],
    ) -> Result<NewNode, Failure> {
        let (format, new) = {
            let _turn = turns.take(nodes).await;
            let format = match (&self.format, self.is_there) {
                (None, false) => Some(nodes.device(source)?.info().format.to_owned()),
                (format, _) => format.clone(),
            };
            let new = match &format {
                Some(format) if !self.is_there => {
                    Some(self.describe(nodes, source, (format, backing.node()))?)
                }
                _ => None,
            };
            (format, new)
        };
        if let Some(request) = new {
            let settings = create::prepare(&request).await?;
            create::make(&request.filename, &request.format, &settings).await?;
        }
        let options = self.options(format.as_deref(), backing, rest)?;
        Ok(nodes.open_unlisted(options, turns).await?)
    }

    /// The options of its node.
    fn options(
        &self,
        format: Option<&str>,
        backing: &Backing,
        rest: &[(&str, &str)],
    ) -> Result<Options, Failure> {
        let mut options = Options::default();
        for (key, value) in rest {
            options.set_text(key, *value);
        }
        if let Some(format) = format {
            options.set_text("driver", format);
        }
        if let Some(name) = &self.node_name {
            options.set_text("node-name", &**name);
        }
        options.set_group("file", filename::node_options(&self.filename)?);
        let takes_backing = format == Some("qcow2");
        match backing {
            Backing::Needed(node) => options.set_text("backing", &**node),
            Backing::Usual(node) if takes_backing => options.set_text("backing", &**node),
            Backing::Later(_) => options.set("backing", Scalar::Null),
            Backing::Own if takes_backing && !self.is_there => {
                options.set("backing", Scalar::Null);
            }
            Backing::Own | Backing::Usual(_) => {}
        }
        Ok(options)
    }

    /// The file as it is to be made.
    fn describe(
        &self,
        nodes: &Nodes,
        source: &str,
        (format, backing): (&str, Option<&str>),
    ) -> Result<CreateRequest, Failure> {
        let below = match backing {
            Some(backing) => Some(nodes.as_backing(backing)?),
            None => None,
        };
        Ok(CreateRequest {
            filename: self.filename.clone(),
            format: format.to_owned(),
            size_bytes: Some(nodes.device(source)?.size_bytes()),
            backing: below.as_ref().map(|below| below.name.clone()),
            backing_format: below.and_then(|below| below.format),
            unchecked_backing: true,
            ..CreateRequest::default()
        })
    }
}

/// The refusal of a target whose source stands on something else since it was looked at.
pub(super) fn changed_meanwhile(source: &str) -> Failure {
    Failure::new(format!(
        "The backing chain of '{source}' has changed while the target was opened: try again"
    ))
}

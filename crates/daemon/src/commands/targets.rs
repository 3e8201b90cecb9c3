//! Targets that a command makes, or opens, for its job alone: `drive-mirror`, `drive-backup`.

use vellum::qcow2::BackingName;
use vellum_graph::Nodes;
use vellum_graph::live::{NewNode, Turns};
use vellum_images::create::{self, CreateRequest};
use vellum_options::{Options, Scalar, filename};

use crate::qmp::{Arguments, Failure};

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
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// What a target was found to stand on, before it was opened: it must still be so when it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TargetPlan {
    pub(super) backing: Backing,
    made: Option<MadeFile>,
}

/// A file that is made for a target.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MadeFile {
    format: String,
    size_bytes: u64,
    /// What its header names.
    backing: Option<BackingName>,
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

    /// What there is to know before it is opened, which stands on `backing`: of a file that is made the size
    /// of the node `source`, and its format where none is given.
    pub(super) fn plan(
        &self,
        nodes: &Nodes,
        source: &str,
        backing: Backing,
    ) -> Result<TargetPlan, Failure> {
        let made = match self.is_there {
            true => None,
            false => {
                let device = nodes.device(source)?;
                let format = self.format.clone();
                let backing = backing.node().map(|node| nodes.as_backing(node));
                Some(MadeFile {
                    format: format.unwrap_or_else(|| device.info().format.to_owned()),
                    size_bytes: device.size_bytes(),
                    backing: backing.transpose()?,
                })
            }
        };
        Ok(TargetPlan { backing, made })
    }

    /// Makes the file if it is not there, and opens it. `rest` are its options beside.
    pub(super) async fn open(
        &self,
        (nodes, turns): (&Nodes, Turns),
        plan: &TargetPlan,
        rest: &[(&str, &str)],
    ) -> Result<NewNode, Failure> {
        if let Some(made) = &plan.made {
            let below = made.backing.clone();
            let request = CreateRequest {
                filename: self.filename.clone(),
                format: made.format.clone(),
                size_bytes: Some(made.size_bytes),
                backing: below.as_ref().map(|below| below.name.clone()),
                backing_format: below.and_then(|below| below.format),
                unchecked_backing: true,
                ..CreateRequest::default()
            };
            let settings = create::prepare(&request).await?;
            create::make(&request.filename, &request.format, &settings).await?;
        }
        let made = plan.made.as_ref().map(|made| &made.format);
        let format = made.or(self.format.as_ref()).map(String::as_str);
        let options = self.options(format, &plan.backing, rest)?;
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
}

/// The refusal of a target whose source is another one, or stands on another one, since it was looked at.
pub(super) fn changed_meanwhile(source: &str) -> Failure {
    Failure::new(format!(
        "'{source}', or what it stands on, has changed while the target was opened: try again"
    ))
}

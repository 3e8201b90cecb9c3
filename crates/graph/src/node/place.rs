//! Where a node is opened: below which files and nodes. Plain data; the nodes themselves are in the open context.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use vellum::{Error, ErrorKind, Result, Storage};
use vellum_storage::file::FileStorage;

/// Where a node is opened: the files above it, so that no chain bites its tail, and the nodes above it.
#[derive(Debug, Clone, Default)]
pub struct NodePlace {
    above: Vec<(u64, u64)>,
    /// The nearest node above that has a name.
    pub(crate) parent: Option<String>,
    /// The node to which all belong that are made here.
    owner: Option<String>,
    /// What the node is to the one above it, where that one notes it.
    pub(crate) role: Option<String>,
    /// The node has its name, and is opened anew under it.
    pub(crate) reopens: bool,
    /// It is opened as it was before a change that failed: nobody has come in its way since.
    pub(crate) reverts: bool,
    /// It is as a state file says that it was when another process ended.
    pub(crate) restored: bool,
    /// Files that are open already, for whoever opens them anew: their locks pass on.
    pub(crate) kept: Vec<Arc<FileStorage>>,
    /// The node that owns what is made here is being opened, and not shown yet.
    pub(crate) opening: Option<Turns>,
}

/// In whose turn an opening takes what it refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turns {
    /// In turns of its own: it is opened beside everything else.
    Own,
    /// In that of whoever asks for it, who changes the graph.
    Held,
}

impl NodePlace {
    /// A place that nothing leads to, beside other nodes, for the node `owner`, which is not shown before
    /// all is open.
    pub(crate) fn opening(owner: &str, turns: Turns) -> NodePlace {
        NodePlace {
            owner: Some(owner.to_owned()),
            opening: Some(turns),
            ..NodePlace::default()
        }
    }

    /// The node with which what is opened here is shown, later.
    pub(crate) fn opening_root(&self) -> Option<&str> {
        self.owner().filter(|_| self.opening.is_some())
    }

    /// The same for whoever opens it later, when it is shown.
    pub(crate) fn for_later(&self) -> NodePlace {
        NodePlace {
            kept: Vec::new(),
            restored: false,
            opening: None,
            ..self.clone()
        }
    }

    /// The place of what stands below a node.
    pub(crate) fn inside(&self, name: Option<&str>) -> NodePlace {
        NodePlace {
            parent: name.map(str::to_owned).or(self.parent.clone()),
            role: None,
            reopens: false,
            ..self.clone()
        }
    }

    /// The place of a child, which the node above knows by `role`.
    pub(crate) fn child(&self, role: &str) -> NodePlace {
        NodePlace {
            role: Some(role.to_owned()),
            ..self.clone()
        }
    }

    /// The node to which all belong that are made here.
    pub(crate) fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    /// Notes a file, unless it is one of those above.
    pub(crate) fn enter(&mut self, file: &FileStorage) -> Result<()> {
        let name = file.name();
        let Ok(metadata) = std::fs::metadata(name) else {
            return Ok(());
        };
        let id = (metadata.dev(), metadata.ino());
        if self.above.contains(&id) {
            let message = format!("Backing file '{name}' creates an infinite loop.");
            return Err(Error::new(ErrorKind::InvalidImage, "open", message).target(name));
        }
        self.above.push(id);
        Ok(())
    }
}

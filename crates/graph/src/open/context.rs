//! [`OpenContext`]: what is around a node that is being opened, and `Driver`: how one is opened.
//!
//! The table of all drivers ([`crate::drivers`]) is handed in with the context: what opens nodes knows no driver.

use std::fmt;
use std::os::unix::fs::FileTypeExt;
use std::pin::Pin;
use std::sync::Arc;

use vellum::{BlockDevice, Result, Storage};
use vellum_options::{OpenFlags, Options};

use crate::live::new_node::NameClaim;
use crate::live::nodes::{Nodes, Turn};
use crate::node::driver::DriverFacts;
use crate::node::errors::inactive_child;
use crate::node::file_node::{self, CommonOptions, FileUse};
use crate::node::file_policy::FilePolicy;
use crate::node::opened::OpenedNode;
use crate::node::origin::Origin;
use crate::node::place::NodePlace;

/// A node, or a device, on its way.
pub(crate) type Opening<T = OpenedNode> = Pin<Box<dyn Future<Output = Result<T>>>>;

/// A driver: what there is to know of it, and how it opens a node.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) facts: DriverFacts,
    pub(crate) open: Open,
}

/// How a driver opens a node.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Open {
    /// A protocol or a filter, which opens what it stands on itself, with its own options, and what every node has.
    Node(fn(Options, CommonOptions, OpenContext) -> Opening),
    /// A format, whose file is open and locked by then.
    Format(OpenFormat),
}

/// How a format opens an image.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenFormat {
    /// How it uses its file.
    pub(crate) file_use: FileUse,
    pub(crate) open: fn(FormatOpening) -> Opening<Arc<dyn BlockDevice>>,
}

/// A format, as the table of drivers has it.
pub(crate) type NamedFormat = (DriverFacts, OpenFormat);

/// An image on its way.
pub(crate) struct FormatOpening {
    /// The format that it is taken for.
    pub(crate) format: &'static str,
    /// Its content told the format, and nobody else did.
    pub(crate) is_probed: bool,
    /// The file that holds it.
    pub(crate) file: Arc<dyn Storage>,
    /// What is left of the node's options.
    pub(crate) options: Options,
    pub(crate) common: CommonOptions,
    /// How it is opened, and where.
    pub(crate) around: OpenContext,
}

/// The drivers that there are, sorted by name.
#[derive(Clone, Copy)]
pub struct DriverTable(pub(crate) &'static [Driver]);

impl fmt::Debug for DriverTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DriverTable({})", self.0.len())
    }
}

impl DriverTable {
    /// The driver of a name.
    pub(crate) fn find(self, name: &str) -> Result<&'static Driver> {
        let found = self.0.iter().find(|driver| driver.facts.name == name);
        found.ok_or_else(|| file_node::unknown_driver(name))
    }

    /// As [`DriverTable::find`], of a format.
    pub(crate) fn find_format(self, name: &str) -> Result<NamedFormat> {
        match self.find(name)? {
            Driver {
                facts,
                open: Open::Format(format),
            } => Ok((*facts, *format)),
            Driver {
                open: Open::Node(_),
                ..
            } => Err(file_node::unknown_driver(name)),
        }
    }

    /// The driver of a file that is named without one: devices have their own.
    pub(crate) fn of_file(self, name: Option<&str>) -> Result<&'static Driver> {
        let kind = name.and_then(|name| std::fs::metadata(name).ok());
        let kind = kind.map(|metadata| metadata.file_type());
        match kind.is_some_and(|kind| kind.is_block_device() || kind.is_char_device()) {
            true => self.find("host_device"),
            false => self.find("file"),
        }
    }
}

/// What is around a node that is being opened.
#[derive(Debug, Clone)]
pub struct OpenContext {
    /// How images are opened.
    pub flags: OpenFlags,
    /// How files are opened.
    pub policy: FilePolicy,
    /// What it stands below.
    pub place: NodePlace,
    /// The nodes that its options may refer to.
    pub nodes: Nodes,
    /// The drivers that its options may name.
    pub drivers: DriverTable,
}

impl OpenContext {
    /// Waits for a turn, where what is opened here takes turns of its own. To be held for moments.
    pub(crate) async fn take_turn(&self) -> Option<Turn> {
        self.nodes.take_turn_at(&self.place).await
    }

    /// Whether every node has a name here, if need be one that is made up.
    pub(crate) fn names_all(&self) -> bool {
        self.nodes.names_all(&self.place)
    }

    /// The name of the live node that is opened here, `given` or as it was before it was opened
    /// anew.
    pub(crate) fn own_name<'a>(&'a self, given: Option<&'a str>) -> Option<&'a str> {
        let kept = self.place.parent.as_deref().filter(|_| self.place.reopens);
        given.or(kept).filter(|_| self.nodes.are_live())
    }

    /// Whether the node whose parts are opened here is there already, and is opened anew.
    pub(crate) fn is_reopened(&self) -> bool {
        let parent = self.place.parent.as_deref();
        parent.is_some_and(|parent| self.nodes.contains(parent))
    }

    /// Refuses a node as `role` of an active one, if it is inactive.
    pub(crate) fn check_activity(&self, name: &str, role: &str) -> Result<()> {
        let above = self.place.parent.as_deref().unwrap_or_default();
        match !self.flags.inactive && self.nodes.is_inactive(name) {
            true => Err(inactive_child(name, role, above)),
            false => Ok(()),
        }
    }

    /// Notes that the node above uses another one, be it behind a link.
    pub(crate) fn note_use(&self, name: &str, role: &str, linked: bool) -> Result<()> {
        match self.place.parent {
            Some(_) => self.nodes.note(&self.place, name, role, linked),
            None => Ok(()),
        }
    }

    /// Reserves the name of the node that is opened here, before anything below it is opened: uses are
    /// recorded under that name from then on.
    ///
    /// # Errors
    /// If the name is malformed, or another node has it.
    pub(crate) fn claim_name(&self, name: &str) -> Result<NameClaim> {
        self.nodes.claim_name(&self.place, name)
    }

    /// Gives the node that was opened here a name.
    pub(crate) fn name(
        &self,
        name: &str,
        node: OpenedNode,
        origin: Option<Origin>,
    ) -> Result<OpenedNode> {
        let named = self.nodes.name(&self.place, name, node, origin)?;
        if let Some(role) = &self.place.role {
            self.note_use(name, role, false)?;
        }
        Ok(named)
    }
}

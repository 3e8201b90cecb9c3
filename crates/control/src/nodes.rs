//! Nodes with names, as `--blockdev` makes them: one may stand on another.
//!
//! Invariant: a node knows only those that were added before it, so there are no
//! circles, and closing in the opposite order never closes what is still used.

use std::collections::BTreeMap;
use std::sync::Arc;

use vellum::{BlockDevice, Error, ErrorKind, Raw, RawOptions, Result};

use crate::OpenFlags;
use crate::file_node::{self, Unlocked, Use};
use crate::gate::FilePolicy;
use crate::open::{self, Place};
use crate::options::Options;

/// What a name stands for.
#[derive(Debug, Clone)]
pub(crate) enum Node {
    /// A file, whose locks depend on who uses it.
    File(Unlocked),
    /// A format over a file.
    Device(Arc<dyn BlockDevice>),
}

/// Nodes by name.
#[derive(Debug, Clone, Default)]
pub struct Nodes {
    nodes: Arc<BTreeMap<String, Node>>,
    /// In the order in which they were added.
    names: Vec<String>,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

/// The refusal of a reference that leads nowhere.
pub(crate) fn unknown(name: &str) -> Error {
    invalid(format!(
        "Cannot find device='{name}' nor node-name='{name}'"
    ))
}

/// Names begin with a letter and hold letters, digits and `-._`.
fn is_well_formed(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
}

impl Nodes {
    /// No nodes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens a node and gives it the name that its `node-name` says.
    ///
    /// # Errors
    /// In QEMU's words, as far as it has some.
    pub async fn add(&mut self, mut options: Options) -> Result<()> {
        let Some(driver) = options.get_text("driver").map(str::to_owned) else {
            return Err(invalid("Parameter 'driver' is missing"));
        };
        let Some(name) = options.get_text("node-name").map(str::to_owned) else {
            return Err(invalid("'node-name' must be specified for the root node"));
        };
        if !is_well_formed(&name) {
            return Err(invalid(format!("Invalid node-name: '{name}'")));
        }
        if self.nodes.contains_key(&name) {
            return Err(invalid(format!("Duplicate nodes with node-name='{name}'")));
        }
        let flags = OpenFlags {
            writable: true,
            ..OpenFlags::default()
        };
        let node = if file_node::is_file_driver(&driver) {
            options.set_text("driver", driver);
            Node::File(file_node::open_unlocked(options, &flags)?)
        } else if !matches!(driver.as_str(), "raw" | "qcow2") {
            return Err(invalid(format!(
                "Parameter 'driver' does not accept value '{driver}'"
            )));
        } else {
            let place = Place::among(self.clone());
            Node::Device(open::open_node(options, &flags, &FilePolicy::Any, place).await?)
        };
        Arc::make_mut(&mut self.nodes).insert(name.clone(), node);
        self.names.push(name);
        Ok(())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// The node called `name` as a device.
    ///
    /// # Errors
    /// If there is none, or its file is locked by somebody.
    pub fn device(&self, name: &str) -> Result<Arc<dyn BlockDevice>> {
        match self.nodes.get(name) {
            None => Err(invalid(format!(
                "Cannot find device='' nor node-name='{name}'"
            ))),
            Some(Node::Device(device)) => Ok(device.clone()),
            Some(Node::File(file)) => raw(file),
        }
    }

    /// The node that another one refers to.
    pub(crate) fn referred(&self, name: &str) -> Result<&Node> {
        self.nodes.get(name).ok_or_else(|| unknown(name))
    }

    /// Closes all nodes, the last first; returns the first failure.
    pub async fn close(self) -> Result<()> {
        let mut result = Ok(());
        for name in self.names.iter().rev() {
            if let Some(Node::Device(device)) = self.nodes.get(name) {
                result = result.and(device.close().await);
            }
        }
        result
    }
}

impl Node {
    /// The node as a backing device.
    pub(crate) fn as_backing(&self) -> Result<Arc<dyn BlockDevice>> {
        match self {
            Node::Device(device) => Ok(device.clone()),
            Node::File(file) => raw(&file.for_user(false)?),
        }
    }
}

/// A file as a device.
fn raw(file: &Unlocked) -> Result<Arc<dyn BlockDevice>> {
    let options = RawOptions {
        read_only: !file.is_writable(),
        ..RawOptions::default()
    };
    let file = file.clone().lock(&OpenFlags::default(), Use::Raw)?;
    Ok(Raw::open(file, options)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::create;
    use vellum::{Buffer, RequestFlags};
    use vellum_storage::lane;

    async fn add(nodes: &mut Nodes, text: &str) -> std::result::Result<(), String> {
        let options = Options::parse(text).unwrap();
        let added = nodes.add(options).await;
        added.map_err(|error| crate::error_text(&error))
    }

    fn image(name: &str, options: &str) -> String {
        lane::block_on(async {
            let mut settings = create::settings(name, "qcow2").unwrap();
            settings.set("size", "1M").unwrap();
            settings.parse(options).unwrap();
            create::make(name, "qcow2", &settings).await.unwrap();
        });
        name.to_owned()
    }

    #[test]
    fn a_node_may_stand_on_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let base = image(&path("base"), "");
        let top = image(&path("top"), "");
        lane::block_on(async {
            let mut nodes = Nodes::new();
            let file = format!("driver=file,node-name=f,filename={base}");
            add(&mut nodes, &file).await.unwrap();
            add(&mut nodes, "driver=qcow2,node-name=b,file=f")
                .await
                .unwrap();
            let below = nodes.device("b").unwrap();
            let written = below.write(0, Buffer::copy_of(&[7; 512]), RequestFlags::default());
            written.await.unwrap();
            let top = format!("driver=qcow2,node-name=t,file.filename={top},backing=b");
            add(&mut nodes, &top).await.unwrap();
            let device = nodes.device("t").unwrap();
            let read = device.read(0, Buffer::for_read(512)).await.unwrap();
            assert_eq!(read[..], [7; 512]);
            nodes.close().await.unwrap();
        });
    }

    #[test]
    fn what_cannot_be_is_told_in_qemus_words() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("f").display().to_string();
        image(&file, "");
        lane::block_on(async {
            let mut nodes = Nodes::new();
            let good = format!("driver=file,node-name=f,filename={file},read-only=on");
            add(&mut nodes, &good).await.unwrap();
            for (text, message) in [
                ("node-name=x", "Parameter 'driver' is missing"),
                (
                    "driver=bad,node-name=x",
                    "Parameter 'driver' does not accept value 'bad'",
                ),
                (
                    "driver=file,node-name=f",
                    "Duplicate nodes with node-name='f'",
                ),
                ("driver=file,node-name=0f", "Invalid node-name: '0f'"),
                (
                    "driver=qcow2,node-name=d,file=g",
                    "Cannot find device='g' nor node-name='g'",
                ),
                (
                    "driver=qcow2,node-name=d,file=f,read-only=on,backing=g",
                    "Could not open backing file: Cannot find device='g' nor node-name='g'",
                ),
                ("driver=qcow2,node-name=d,file=f", "Block node is read-only"),
            ] {
                assert_eq!(add(&mut nodes, text).await.unwrap_err(), message, "{text}");
            }
            let message = nodes.device("g").unwrap_err().message().to_owned();
            assert_eq!(message, "Cannot find device='' nor node-name='g'");
        });
    }
}

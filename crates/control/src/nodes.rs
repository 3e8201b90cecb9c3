//! Nodes with names, as `--blockdev` makes them: one may stand on another.
//!
//! Invariant: a node knows only those that were added before it, so there are no
//! circles, and closing in the opposite order never closes what is still used.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vellum::{BlockDevice, Error, ErrorKind, Result};

use crate::OpenFlags;
use crate::gate::FilePolicy;
use crate::graph::{self, Around, Body, Opened, Role};
use crate::open::Place;
use crate::options::Options;

#[derive(Debug, Default)]
struct Named {
    nodes: BTreeMap<String, Opened>,
    /// Those that stand on their own, in the order in which they were added.
    roots: Vec<String>,
}

/// Nodes by name; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Nodes(Arc<Mutex<Named>>);

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

/// The refusal of a reference that leads nowhere.
pub(crate) fn unknown(name: &str) -> Error {
    invalid(format!(
        "Cannot find device='{name}' nor node-name='{name}'"
    ))
}

fn duplicate(name: &str) -> Error {
    invalid(format!("Duplicate nodes with node-name='{name}'"))
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
    pub async fn add(&mut self, options: Options) -> Result<()> {
        let Some(driver) = options.get_text("driver").map(str::to_owned) else {
            return Err(invalid("Parameter 'driver' is missing"));
        };
        let Some(name) = options.get_text("node-name").map(str::to_owned) else {
            return Err(invalid("'node-name' must be specified for the root node"));
        };
        if !is_well_formed(&name) {
            return Err(invalid(format!("Invalid node-name: '{name}'")));
        }
        if self.lock().nodes.contains_key(&name) {
            return Err(duplicate(&name));
        }
        crate::drivers::find(&driver).map_err(|_| {
            invalid(format!(
                "Parameter 'driver' does not accept value '{driver}'"
            ))
        })?;
        let around = Around {
            flags: OpenFlags {
                writable: true,
                ..OpenFlags::default()
            },
            policy: FilePolicy::Any,
            place: Place::among(self.clone()),
        };
        // It names itself, as does every node below it that wants to.
        graph::open(options, Role::Image, &around).await?;
        self.lock().roots.push(name);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Named> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a node a name.
    pub(crate) fn name(&self, name: &str, node: Opened) -> Result<()> {
        if !is_well_formed(name) {
            return Err(invalid(format!("Invalid node-name: '{name}'")));
        }
        let mut named = self.lock();
        if named.nodes.contains_key(name) {
            return Err(duplicate(name));
        }
        named.nodes.insert(name.to_owned(), node);
        Ok(())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lock().nodes.is_empty()
    }

    /// The node called `name` as a device.
    ///
    /// # Errors
    /// If there is none, or its file is locked by somebody.
    pub fn device(&self, name: &str) -> Result<Arc<dyn BlockDevice>> {
        let node = self.lock().nodes.get(name).cloned();
        match node {
            None => Err(invalid(format!(
                "Cannot find device='' nor node-name='{name}'"
            ))),
            Some(node) => node.into_device(&OpenFlags::default()),
        }
    }

    /// The node that another one refers to.
    pub(crate) fn referred(&self, name: &str) -> Result<Opened> {
        let node = self.lock().nodes.get(name).cloned();
        node.ok_or_else(|| unknown(name))
    }

    /// Closes all nodes, the last first; returns the first failure.
    pub async fn close(self) -> Result<()> {
        let roots = std::mem::take(&mut self.lock().roots);
        let mut result = Ok(());
        for name in roots.iter().rev() {
            let node = self.lock().nodes.remove(name);
            result = result.and(match node.map(|node| node.body) {
                Some(Body::Device(device)) => device.close().await,
                Some(Body::Storage(storage)) => storage.close().await,
                None => Ok(()),
            });
        }
        result
    }
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

//! Commands about the dirty bitmaps of an image. They are persistent, all of them: there
//! are none that end with the program.

use std::rc::Rc;
use std::sync::Arc;

use serde_json::Value;
use vellum::qcow2::info::BitmapInfo;
use vellum::qcow2::{BitmapOptions, Bitmaps, DirtyBitmap};
use vellum::{BlockDevice, Error};
use vellum_control::Nodes;
use vellum_control::nodes::unknown;
use vellum_control::qmp::{Arguments, Failure, Outcome};

use super::{Daemon, done};

/// A bitmap that is named by a node and its name.
struct Named {
    node: String,
    name: String,
}

impl Named {
    fn take(arguments: &mut Arguments) -> Result<Named, Failure> {
        Ok(Named {
            node: arguments.need_text("node")?,
            name: arguments.need_text("name")?,
        })
    }

    /// The bitmaps of the node, among which the named one is, that no job keeps to itself.
    async fn find(&self, daemon: &Daemon, nodes: &Nodes) -> Result<Bitmaps, Failure> {
        bitmaps(&image(nodes, &self.node)?)?;
        let Some((bitmaps, _)) = look_up(nodes, &self.node, &self.name).await? else {
            return Err(Failure::new(format!(
                "Dirty bitmap '{}' not found",
                self.name
            )));
        };
        check_free(daemon, &self.node, &self.name)?;
        Ok(bitmaps)
    }
}

/// The bitmaps of a node, and what there is to say of the named one, if there is one.
pub(super) async fn look_up(
    nodes: &Nodes,
    node: &str,
    name: &str,
) -> Result<Option<(Bitmaps, BitmapInfo)>, Failure> {
    let Ok(bitmaps) = bitmaps(&image(nodes, node)?) else {
        return Ok(None);
    };
    let list = bitmaps.list().await?;
    let found = list.into_iter().find(|one| one.name == name);
    Ok(found.map(|info| (bitmaps, info)))
}

/// The refusal of a bitmap whose content is lost.
pub(super) fn inconsistent(name: &str) -> Failure {
    Failure::new(format!(
        "Bitmap '{name}' is inconsistent and cannot be used"
    ))
}

/// Refuses a bitmap that a job keeps to itself.
pub(super) fn check_free(daemon: &Daemon, node: &str, name: &str) -> Result<(), Failure> {
    match daemon.jobs.keep_bitmap(node, name) {
        false => Ok(()),
        true => Err(Failure::new(format!(
            "Bitmap '{name}' is currently in use by another operation and cannot be used"
        ))),
    }
}

fn image(nodes: &Nodes, node: &str) -> Result<Arc<dyn BlockDevice>, Failure> {
    match nodes.contains(node) {
        true => Ok(nodes.device(node)?),
        false => Err(unknown(node).into()),
    }
}

fn bitmaps(image: &Arc<dyn BlockDevice>) -> Result<Bitmaps, Failure> {
    let qcow2 = image.as_qcow2();
    let qcow2 = qcow2.ok_or_else(|| Failure::new("the node's format has no bitmaps"))?;
    Ok(qcow2.bitmaps())
}

pub(super) async fn add(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let named = Named::take(&mut arguments)?;
    let granularity = arguments.number("granularity")?;
    let persistent = arguments.switch("persistent")?.unwrap_or(false);
    let disabled = arguments.switch("disabled")?.unwrap_or(false);
    arguments.finish()?;
    let granularity_bytes = match granularity {
        None => None,
        Some(bytes) => match u64::try_from(bytes) {
            Ok(bytes) if bytes >= 512 && bytes.is_power_of_two() => Some(bytes),
            Ok(bytes) if bytes >= 512 => {
                return Err(Failure::new("Granularity must be power of 2"));
            }
            _ => return Err(Failure::new("Granularity must be at least 512")),
        },
    };
    let parts = daemon.parts.lock().await;
    let image = image(&parts.nodes, &named.node)?;
    if named.name.is_empty() {
        return Err(Failure::new("Bitmap name cannot be empty"));
    }
    if !persistent {
        return Err(Failure::new(
            "Bitmaps that are not persistent are not part of this version",
        ));
    }
    let bitmaps = bitmaps(&image)?;
    let list = bitmaps.list().await?;
    if list.iter().any(|one| one.name == named.name) {
        return Err(Failure::new(format!(
            "Bitmap already exists: {}",
            named.name
        )));
    }
    let options = BitmapOptions {
        granularity_bytes,
        disabled,
        node_name: Some(named.node.clone()),
    };
    bitmaps.add(&named.name, options).await?;
    done()
}

pub(super) async fn remove(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let named = Named::take(&mut arguments)?;
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    named
        .find(&daemon, &parts.nodes)
        .await?
        .remove(&named.name)
        .await?;
    done()
}

pub(super) async fn clear(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let named = Named::take(&mut arguments)?;
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    named
        .find(&daemon, &parts.nodes)
        .await?
        .clear(&named.name)
        .await?;
    done()
}

pub(super) async fn enable(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let named = Named::take(&mut arguments)?;
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    named
        .find(&daemon, &parts.nodes)
        .await?
        .enable(&named.name)
        .await?;
    done()
}

pub(super) async fn disable(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let named = Named::take(&mut arguments)?;
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    named
        .find(&daemon, &parts.nodes)
        .await?
        .disable(&named.name)
        .await?;
    done()
}

pub(super) async fn merge(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let node = arguments.need_text("node")?;
    let target = arguments.need_text("target")?;
    let sources = arguments.need_array("bitmaps")?;
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    let target = Named { node, name: target };
    let bitmaps = target.find(&daemon, &parts.nodes).await?;
    let mut dirty: Vec<DirtyBitmap> = Vec::with_capacity(sources.len());
    for source in sources {
        let source = match source {
            Value::String(name) => Named {
                node: target.node.clone(),
                name,
            },
            Value::Object(members) => {
                let mut external = Arguments::new(members);
                let source = Named::take(&mut external)?;
                external.finish()?;
                source
            }
            _ => {
                return Err(Failure::new(
                    "Invalid parameter type for 'bitmaps', expected: BlockDirtyBitmapOrStr",
                ));
            }
        };
        let read = source
            .find(&daemon, &parts.nodes)
            .await?
            .read(&source.name)
            .await;
        dirty.push(read.map_err(|error: Error| Failure::from(error))?);
    }
    bitmaps.merge(&target.name, dirty).await?;
    done()
}

//! Commands of QEMU's developers about the graph: what it looks like, which thread a node runs in,
//! children that come and go.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use serde_json::{Value, json};
use vellum_graph::Nodes;
use vellum_graph::live::{Changes, RequiredAccess, User, unknown};

use crate::daemon::Daemon;
use crate::qmp::{Arguments, Failure, Outcome};

use super::request::request;

/// A node of the graph: what it is, and its name.
type Vertex = (&'static str, String);

fn permissions(changes: Changes, is_shared: bool) -> Vec<&'static str> {
    let all = [
        ("resize", changes.size),
        ("write-unchanged", is_shared),
        ("write", changes.content),
        ("consistent-read", true),
    ];
    let named = all.iter().filter(|(_, is_in)| *is_in);
    named.map(|(name, _)| *name).collect()
}

fn vertex(user: &User) -> Vertex {
    match user {
        User::Node(name) => ("block-driver", name.clone()),
        User::Export(_) => ("block-backend", String::new()),
        User::Job { id, .. } => ("block-job", id.clone()),
    }
}

/// The graph as `x-debug-query-block-graph` shows it.
pub(super) async fn query(daemon: Rc<Daemon>, (): ()) -> Outcome {
    let parts = daemon.parts.lock().await;
    Ok(describe(&parts.nodes))
}

fn describe(nodes: &Nodes) -> Value {
    let uses = nodes.uses();
    // Exports, then jobs, then nodes, those below first; each export is one of its own.
    let mut vertices: Vec<(Option<u64>, Vertex)> = Vec::new();
    let mut known = HashSet::new();
    for kind in ["block-backend", "block-job"] {
        for (id, user, _, _) in &uses {
            let one = (matches!(user, User::Export(_)).then_some(*id), vertex(user));
            if one.1.0 == kind && known.insert(one.clone()) {
                vertices.push(one);
            }
        }
    }
    let names = nodes.bottom_up().into_iter();
    vertices.extend(names.map(|name| (None, ("block-driver", name))));
    let numbers: HashMap<_, usize> = vertices.iter().zip(1..).collect();
    let number = |wanted: &(Option<u64>, Vertex)| numbers.get(wanted).copied().unwrap_or(0);
    let edge = |(id, user, node, wanted): &(u64, User, String, RequiredAccess)| {
        let parent = (matches!(user, User::Export(_)).then_some(*id), vertex(user));
        let shared = Changes {
            content: !wanted.keeps.content,
            size: !wanted.keeps.size,
        };
        json!({
            "parent": number(&parent),
            "child": number(&(None, ("block-driver", node.clone()))),
            "name": wanted.role,
            "perm": permissions(wanted.changes, false),
            "shared-perm": permissions(shared, true),
        })
    };
    let shown = |(at, (_, (kind, name))): (usize, &(Option<u64>, Vertex))| json!({"id": at + 1, "type": kind, "name": name});
    json!({
        "nodes": vertices.iter().enumerate().rev().map(shown).collect::<Vec<_>>(),
        "edges": uses.iter().rev().map(edge).collect::<Vec<_>>(),
    })
}

request! {
    /// `x-blockdev-set-iothread`.
    pub(super) IothreadChange {
        node: String = |a| a.need_text("node-name"),
        iothread: Option<String> = take_iothread,
        is_forced: bool = |a| a.is_on("force"),
    }
}

fn take_iothread(arguments: &mut Arguments) -> Result<Option<String>, Failure> {
    match arguments.need_any("iothread")? {
        Value::Null => Ok(None),
        Value::String(id) => Ok(Some(id)),
        _ => Err(Failure::new(
            "Invalid parameter type for 'iothread', expected: StrOrNull",
        )),
    }
}

/// Nodes run in the lanes of whoever uses them, so there is nothing to move.
pub(super) async fn set_iothread(
    daemon: Rc<Daemon>,
    request: IothreadChange,
) -> Result<(), Failure> {
    let IothreadChange {
        node: name,
        iothread,
        is_forced,
    } = request;
    let parts = daemon.parts.lock().await;
    if !parts.nodes.contains(&name) {
        return Err(Failure::new(format!(
            "Failed to find node with node-name='{name}'"
        )));
    }
    let is_export = |user: &User| matches!(user, User::Export(_));
    if !is_forced && parts.nodes.is_used_by(&name, is_export) {
        return Err(Failure::new(format!(
            "Node {name} is associated with a BlockBackend and could be in use (use force=true to \
             override this check)"
        )));
    }
    match iothread.filter(|id| !parts.objects.iothreads().contains(id)) {
        Some(id) => Err(Failure::new(format!("Cannot find iothread {id}"))),
        None => Ok(()),
    }
}

request! {
    /// `x-blockdev-change`.
    pub(super) ChildChange {
        parent: String = |a| a.need_text("parent"),
        child: Option<String> = |a| a.text("child"),
        node: Option<String> = |a| a.text("node"),
    }
}

/// Gives a quorum one child more or fewer.
pub(super) async fn change(daemon: Rc<Daemon>, request: ChildChange) -> Result<(), Failure> {
    let ChildChange {
        parent,
        child,
        node,
    } = request;
    let parts = daemon.parts.lock().await;
    let nodes = &parts.nodes;
    if !nodes.contains(&parent) {
        return Err(unknown(&parent).into());
    }
    match (child, node) {
        (Some(_), Some(_)) => {
            return Err(Failure::new(
                "The parameters child and node are in conflict",
            ));
        }
        (None, None) => return Err(Failure::new("Either child or node must be specified")),
        (Some(child), None) => nodes.remove_child(&parent, &child).await?,
        (None, Some(node)) if !nodes.contains(&node) => {
            return Err(Failure::new(format!("Node '{node}' not found")));
        }
        (None, Some(node)) => nodes.add_child(&parent, &node).await?,
    }
    Ok(())
}

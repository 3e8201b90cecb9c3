//! Refusals that several parts of the graph have in common, in QEMU's words, and the form of nodes' names.

use vellum::{Error, ErrorKind, Result};
use vellum_options::Options;

pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

/// The refusal of a reference that leads nowhere.
pub fn unknown(name: &str) -> Error {
    invalid(format!(
        "Cannot find device='{name}' nor node-name='{name}'"
    ))
}

/// The same, where only nodes are looked for.
pub fn unknown_node(name: &str) -> Error {
    invalid(format!("Cannot find device='' nor node-name='{name}'"))
}

pub(crate) fn duplicate(name: &str) -> Error {
    invalid(format!("Duplicate nodes with node-name='{name}'"))
}

/// The refusal of a node that is not there, where a command names it.
pub(crate) fn not_found(name: &str) -> vellum::Error {
    invalid(format!("Failed to find node with node-name='{name}'"))
}

/// The refusal of what changes an inactive node.
pub(crate) fn unavailable(permission: &str) -> vellum::Error {
    invalid(format!(
        "Permission '{permission}' unavailable on inactive node"
    ))
}

/// The refusal of an active node on an inactive one.
pub fn inactive_child(name: &str, role: &str, above: &str) -> vellum::Error {
    invalid(format!(
        "Inactive '{name}' can't be a {role} child of active '{above}'"
    ))
}

/// The refusal of a node whose users cannot be led elsewhere.
pub(crate) fn not_exchangeable(name: &str, role: &str) -> Error {
    let message = format!("Node '{name}' cannot be exchanged as '{role}' child");
    Error::new(ErrorKind::Unsupported, "change the graph", message)
}

/// The refusal of a node of which something is in the way.
pub(crate) fn busy(name: &str, why: Option<String>) -> Result<()> {
    match why {
        None => Ok(()),
        Some(why) => Err(invalid(format!("Node '{name}' is busy: {why}"))),
    }
}

/// The refusal of a target that has to do with what is copied to it.
pub(crate) fn invalid_target(target: &str, source: &str) -> Error {
    let message = format!(
        "Node '{target}' cannot be the target of a copy of '{source}': one of them stands on the other. Copy \
         to a node that stands on other files"
    );
    Error::new(ErrorKind::InvalidArgument, "use node", message).target(target)
}

/// The refusal of a node that stands on its user.
pub(crate) fn cycle(node: &str, above: &str, role: &str) -> Error {
    let message = format!("Making '{node}' a {role} child of '{above}' would create a cycle");
    Error::new(ErrorKind::InvalidArgument, "use node", message).target(node)
}

/// The refusal of a node without a child that it needs.
pub(crate) fn missing(key: &str) -> Error {
    invalid(format!("A block device must be specified for \"{key}\""))
}

/// Refuses options that a protocol or filter has not taken.
///
/// # Errors
/// If there is one.
pub fn refuse_unknown(options: &Options, driver: &str) -> Result<()> {
    match options.keys().next() {
        None => Ok(()),
        Some(key) => Err(invalid(format!(
            "Block protocol '{driver}' doesn't support the option '{key}'"
        ))),
    }
}

/// Refuses options that a format has left.
pub(crate) fn refuse_unknown_of_format(options: &Options, format: &str) -> Result<()> {
    match options.keys().next() {
        None => Ok(()),
        Some(key) => Err(invalid(format!(
            "Block format '{format}' does not support the option '{key}'"
        ))),
    }
}

/// Names begin with a letter and hold letters, digits and `-._`.
pub(crate) fn is_well_formed(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
}

/// The mark of a name that was made up.
pub(crate) const MADE_UP: char = '#';

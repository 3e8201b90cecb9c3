//! What commands answer with, whatever they do.

use serde_json::json;

use crate::qmp::{Class, Failure, Outcome};

/// Success without anything to tell.
pub(super) fn done() -> Outcome {
    Ok(json!({}))
}

/// There is no device of this name.
pub(super) fn no_device(name: &str) -> Failure {
    Failure::of(Class::DeviceNotFound, format!("Device '{name}' not found"))
}

/// A failure of a part as that of a command.
pub(super) fn failed(failure: crate::failure::Failure) -> Failure {
    // Hints are for people at a terminal.
    Failure::new(failure.0.split('\n').next().unwrap_or_default())
}

//! What several commands answer with.

use crate::qmp::{Class, Failure};

/// There is no device of this name.
pub(super) fn no_device(name: &str) -> Failure {
    Failure::of(Class::DeviceNotFound, format!("Device '{name}' not found"))
}

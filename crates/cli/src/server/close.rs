//! The end of what was served.

use vellum::BlockDevice;

use super::Failure;
use crate::report;

/// Closes the image named `name`, also after an error: it was opened, so it must be left clean. `served`
/// is how serving it ended, and the error to report first.
pub async fn close(
    device: &dyn BlockDevice,
    name: &str,
    served: Result<(), Failure>,
) -> Result<(), Failure> {
    let closed = device.close().await;
    served?;
    closed.map_err(|error| {
        let text = report::error_text(&error);
        Failure::message(format!("Failed to close '{name}': {text}"))
    })
}

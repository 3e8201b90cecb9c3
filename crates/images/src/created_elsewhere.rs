//! New images on other machines: what the names of drivers mean that can make a file there.

use std::sync::Arc;

use vellum::{Result, Storage};
use vellum_options::{Options, filename, rbd_name, ssh_name};

/// Whether a driver can make what its nodes show.
pub(crate) fn can_create(driver: &str) -> bool {
    matches!(driver, rbd_name::SCHEME | ssh_name::SCHEME)
}

/// Whether a name means something that is made on another machine.
pub(crate) fn is_elsewhere(name: &str) -> bool {
    filename::protocol(name).is_some_and(can_create)
}

/// Makes what a name means, empty; `object_bytes`: the size of the objects that it consists of.
///
/// # Errors
/// What making it meets; a build without the driver.
pub(crate) async fn create(name: &str, object_bytes: Option<u64>) -> Result<Arc<dyn Storage>> {
    create_node(filename::node_options(name)?, 0, object_bytes).await
}

/// Makes what the options of a node mean, of `size_bytes`; `object_bytes`: the size of the objects that it consists of.
///
/// # Errors
/// What making it meets; a build without the driver.
pub async fn create_node(
    options: Options,
    size_bytes: u64,
    object_bytes: Option<u64>,
) -> Result<Arc<dyn Storage>> {
    match options.get_text("driver") {
        #[cfg(feature = "rbd")]
        Some(rbd_name::SCHEME) => {
            vellum_graph::drivers::create_rbd(options, size_bytes, object_bytes).await
        }
        #[cfg(feature = "ssh")]
        Some(ssh_name::SCHEME) => {
            let file = vellum_graph::drivers::create_ssh(options).await?;
            file.truncate(size_bytes).await?;
            Ok(file)
        }
        driver => {
            let _ = (size_bytes, object_bytes);
            let driver = driver.unwrap_or_default();
            let message =
                format!("The protocol '{driver}' requires a build with the feature '{driver}'");
            Err(vellum::Error::new(
                vellum::ErrorKind::Unsupported,
                "create",
                message,
            ))
        }
    }
}

/// Takes away what was made and is of no use to anybody. A file by ssh stays, as in QEMU.
pub(crate) async fn remove(name: &str) {
    #[cfg(feature = "rbd")]
    if filename::protocol(name) == Some(rbd_name::SCHEME)
        && let Ok(options) = filename::node_options(name)
    {
        // The first error is the one to tell.
        let _ = vellum_graph::drivers::remove_rbd(options).await;
    }
    #[cfg(not(feature = "rbd"))]
    let _ = name;
}

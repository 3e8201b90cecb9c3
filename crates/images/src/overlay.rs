//! A temporary layer that takes all writes, and is gone with the program.

use std::path::PathBuf;
use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, OpenOptions, Qcow2};
use vellum::{BlockDevice, Error, Result};
use vellum_storage::file::{Create, FileOptions, FileStorage};

/// Where QEMU puts such files if nobody says where.
const FOLDER: &str = "/var/tmp";

/// Puts an empty image on top of `device`, in a file that has no name any more.
///
/// # Errors
/// If there is no space for the file.
pub async fn put_on(device: Arc<dyn BlockDevice>) -> Result<Arc<dyn BlockDevice>> {
    let folder = std::env::var_os("TMPDIR").map_or(FOLDER.into(), PathBuf::from);
    let failed = |cause: std::io::Error| {
        Error::from_io("create", &cause).context("open", "Could not get temporary filename")
    };
    let name = tempfile::Builder::new()
        .prefix("vl.")
        .tempfile_in(folder)
        .map_err(failed)?
        .into_temp_path();
    let file = FileStorage::open(&name, &FileOptions::default().create(Create::Truncate))?;
    name.close().map_err(failed)?;
    let options = CreateOptions::default().size_bytes(device.size_bytes());
    create(file.clone(), None, &options).await?;
    let options = OpenOptions::default().backing(Backing::Given(device));
    Ok(Qcow2::open(file, Arc::new(DenyAll), options).await?)
}

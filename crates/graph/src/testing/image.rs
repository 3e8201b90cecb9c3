//! [`make_image`]: qcow2 images for tests, made by the engine alone.

use std::sync::Arc;

use vellum::Storage;
use vellum::qcow2::create::{CreateOptions, create};
use vellum_storage::file::{Create, FileOptions, FileStorage};

/// Makes a qcow2 image in the file `path`.
///
/// # Panics
///
/// If that fails.
pub async fn make_image(path: &str, options: &CreateOptions) {
    let new = FileOptions::default().create(Create::Truncate);
    let file: Arc<dyn Storage> = FileStorage::open(path, &new).unwrap();
    create(file.clone(), None, options).await.unwrap();
    file.close().await.unwrap();
}

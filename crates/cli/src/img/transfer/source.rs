//! What a source is known by, so that a stream which was cut off goes on with the same bytes.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum::qcow2::{AsQcow2, DirtyBitmap};
use vellum_format::stream::payload_hash;

/// A hash over what is known of a source: of each layer its format and size, and of a file which
/// one it is, how long and when it was changed; of what is elsewhere only its name. Also which
/// snapshot is sent, or what a bitmap calls dirty.
pub fn identity(
    source: &Arc<dyn BlockDevice>,
    snapshot: Option<&str>,
    bitmap: Option<&DirtyBitmap>,
) -> [u8; 32] {
    let mut text = String::new();
    let mut next = Some(source.clone());
    while let Some(device) = next {
        let info = device.info();
        let name = device.storage().map(|storage| storage.name().to_owned());
        let name = name.unwrap_or_else(|| info.name.clone());
        let size_bytes = device.size_bytes();
        text += &format!("{} {size_bytes} {}\n", info.format, file(&name));
        if let Some(image) = device.as_qcow2() {
            text += &format!("data {}\n", file(image.data_storage().name()));
        }
        next = device.backing();
    }
    text += &format!("snapshot {snapshot:?}\n");
    if let Some(bitmap) = bitmap {
        text += &format!("{} {:?}\n", bitmap.granularity_bytes(), bitmap.sha256());
    }
    payload_hash(text.as_bytes())
}

fn file(name: &str) -> String {
    match std::fs::metadata(name) {
        Ok(file) if file.is_file() => format!(
            "{} {} {} {} {}",
            file.dev(),
            file.ino(),
            file.len(),
            file.mtime(),
            file.mtime_nsec()
        ),
        _ => format!("{name:?}"),
    }
}

//! What a source is known by, so that a stream which was cut off goes on with the same bytes.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum::qcow2::DirtyBitmap;
use vellum_format::stream::payload_hash;
use vellum_graph::layer_files::layer_files;
use vellum_storage::SourceVersion;

/// What is known of a source.
pub struct SourceIdentity {
    /// A hash over all of it.
    pub hash: [u8; 32],
    /// The first part of the source that has nothing to tell whether it was changed.
    pub unknown: Option<String>,
}

/// Hashes what is known of a source: of each layer its format and size, and of each of its files which
/// one it is, how long and when it was changed; of what is elsewhere the name and the version.
/// Also which snapshot is sent, or what a bitmap calls dirty.
pub async fn identity(
    source: &Arc<dyn BlockDevice>,
    snapshot: Option<&str>,
    bitmap: Option<&DirtyBitmap>,
) -> SourceIdentity {
    let (mut text, mut unknown) = (String::new(), None);
    let mut next = Some(source.clone());
    while let Some(device) = next {
        let info = device.info();
        text += &format!("{} {}\n", info.format, device.size_bytes());
        let files = layer_files(&*device);
        if files.is_empty() {
            text += &format!("{:?}\n", info.name);
            unknown.get_or_insert(info.name);
        }
        for storage in files {
            let name = storage.name();
            if storage.version().known().is_some() {
                text += &format!("{name:?} ");
            }
            match SourceVersion::of_storage(&*storage).await {
                SourceVersion::Known(version) => text += &format!("{version}\n"),
                SourceVersion::Unknown => {
                    text += &format!("{name:?}\n");
                    unknown.get_or_insert_with(|| name.to_owned());
                }
            }
        }
        next = device.backing();
    }
    text += &format!("snapshot {snapshot:?}\n");
    if let Some(bitmap) = bitmap {
        text += &format!("{} {:?}\n", bitmap.granularity_bytes(), bitmap.sha256());
    }
    SourceIdentity {
        hash: payload_hash(text.as_bytes()),
        unknown,
    }
}

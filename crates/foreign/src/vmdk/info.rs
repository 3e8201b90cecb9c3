//! What is told of an image: QEMU's "format specific information".

use std::sync::Arc;

use vellum::Storage;

use super::descriptor::Descriptor;
use super::extent::Extent;
use crate::facts::{BackingName, CompressedWrites, Fact, Facts};

/// The create type: the header's of an image in one file, else the descriptor's.
fn create_type(descriptor: &Descriptor, extents: &[Extent]) -> String {
    let text = || descriptor.create_type().unwrap_or_default().to_owned();
    match extents.first() {
        // Whatever stands in the descriptor.
        Some(extent) if extent.is_compressed() => "streamOptimized".to_owned(),
        Some(extent) if descriptor.is_own_extent() => {
            let is_hosted = extent.sparse().is_some_and(|sparse| sparse.is_hosted);
            let name = if is_hosted { "monolithicSparse" } else { "" };
            name.to_owned()
        }
        _ => text(),
    }
}

/// What an image says of itself.
pub(super) fn facts(
    descriptor: &Descriptor,
    extents: &[Extent],
    files: &[Arc<dyn Storage>],
) -> Facts {
    let list = extents.iter().map(|extent| {
        let mut members = Vec::new();
        if extent.is_compressed() {
            members.push(("compressed", Fact::Bool(true)));
        }
        members.push(("virtual-size", Fact::Number(extent.len_bytes)));
        let name = files.get(extent.file).map_or("", |file| file.name());
        members.push(("filename", Fact::Text(name.to_owned())));
        if let Some(bytes) = extent.cluster_size_bytes() {
            members.push(("cluster-size", Fact::Number(bytes)));
        }
        let format = extent.extent_type.map_or("", |it| it.name());
        members.push(("format", Fact::Text(format.to_owned())));
        members
    });
    let backing = descriptor.parent_name().filter(|name| !name.is_empty());
    Facts {
        backing: backing.map(|name| BackingName {
            name: name.to_owned(),
            format: Some("vmdk".to_owned()),
        }),
        specific: vec![
            ("cid", Fact::Number(descriptor.cid().into())),
            ("parent-cid", Fact::Number(descriptor.parent_cid().into())),
            ("create-type", Fact::Text(create_type(descriptor, extents))),
            ("extents", Fact::List(list.collect())),
        ],
        compression: compression(extents),
        ..Facts::default()
    }
}

/// As QEMU: where there are grains such writes are taken, and stored as they are if they have to be.
fn compression(extents: &[Extent]) -> CompressedWrites {
    let is_stream = !extents.is_empty() && extents.iter().all(Extent::is_compressed);
    match (is_stream, common_cluster_size_bytes(extents)) {
        (true, _) => CompressedWrites::Only,
        (false, Some(_)) => CompressedWrites::Also,
        (false, None) => CompressedWrites::No,
    }
}

/// The cluster size of an image whose extents are all of one kind.
pub(super) fn common_cluster_size_bytes(extents: &[Extent]) -> Option<u64> {
    let kind = |extent: &Extent| (extent.is_compressed(), extent.cluster_size_bytes());
    let first = kind(extents.first()?);
    let is_common = extents.iter().all(|extent| kind(extent) == first);
    first.1.filter(|_| is_common)
}

//! The facts as JSON (`--output json`), for programs: names are stable, sizes are in bytes. No I/O.

use serde_json::{Map, Value, json};

use super::advice::Advice;
use super::gather::{Facts, Layer, Qcow2Facts};
use super::picture::draw;

/// Cells of the pictures.
const CELLS: usize = 256;

/// Everything.
pub fn value(facts: &Facts, advice: &[Advice]) -> Value {
    let mut members = Map::new();
    let mut add = |key: &str, value: Value| drop(members.insert(key.to_owned(), value));
    add("image", facts.name.as_str().into());
    add("format", facts.format.into());
    add("virtual-size", facts.size_bytes.into());
    add("layers", facts.layers.iter().map(layer).collect());
    add("absent", facts.absent_bytes.into());
    if let Some(qcow2) = &facts.qcow2 {
        add("qcow2", inside(qcow2));
    }
    let cells = draw(
        &facts.guest,
        facts.guest_cell_bytes,
        facts.size_bytes,
        CELLS,
    );
    let cells = cells.iter().map(|cell| {
        json!({
            "start": cell.start_bytes,
            "length": cell.len_bytes,
            "kind": cell.kind.name(),
            "filled": (cell.filled * 1000.0).round() / 1000.0,
        })
    });
    add("map", cells.collect());
    let advice = advice.iter().map(|advice| {
        json!({
            "code": advice.code,
            "urgent": advice.urgent,
            "gives-back": advice.gives_back_bytes,
            "text": advice.text,
            "command": advice.command,
        })
    });
    add("advice", advice.collect());
    Value::Object(members)
}

fn layer(layer: &Layer) -> Value {
    json!({
        "image": layer.name,
        "format": layer.format,
        "virtual-size": layer.size_bytes,
        "disk-size": layer.disk_bytes,
        "data": layer.data_bytes,
        "compressed": layer.compressed_bytes,
        "zero": layer.zero_bytes,
    })
}

fn inside(qcow2: &Qcow2Facts) -> Value {
    let mut members = Map::new();
    let mut add = |key: &str, value: Value| drop(members.insert(key.to_owned(), value));
    let (info, survey) = (&qcow2.info, &qcow2.survey);
    add("compat", info.compat().into());
    add("cluster-size", info.cluster_size_bytes.into());
    add("extended-l2", info.extended_l2.into());
    add("compression-type", info.compression_type.name().into());
    add("encryption", info.encryption.into());
    add("external-data-file", info.external_data.into());
    add("file-length", survey.file_length_bytes.into());
    add("counted", survey.counted_bytes.into());
    add("clusters", clusters(qcow2));
    add("metadata", metadata(qcow2));
    let missing = qcow2.cut_short.map_or(0, |found| found.missing_bytes);
    add("missing", missing.into());
    add("only-in-snapshots", survey.only_in_snapshots_bytes.into());
    let snapshots = survey.snapshots.iter().zip(&info.snapshots);
    let snapshots = snapshots.map(|(space, snapshot)| {
        json!({
            "id": snapshot.id,
            "name": snapshot.name,
            "total": space.total_bytes,
            "own": space.own_bytes,
            "vm-state": snapshot.vm_state_size_bytes,
        })
    });
    add("snapshots", snapshots.collect());
    let bitmaps = info.bitmaps.iter().map(|bitmap| {
        json!({
            "name": bitmap.name,
            "granularity": bitmap.granularity_bytes,
            "consistent": bitmap.consistent,
            "recording": bitmap.auto,
        })
    });
    add("bitmaps", bitmaps.collect());
    let sizes = survey.cache.by_entry_size.iter();
    let sizes = sizes.map(|(size, bytes)| json!({ "entry-size": size, "bytes": bytes }));
    add(
        "l2-cache",
        json!({
            "whole-disk": survey.cache.whole_disk_bytes,
            "by-entry-size": sizes.collect::<Value>(),
            "packed": survey.cache.packed_bytes,
        }),
    );
    add("check", check(qcow2));
    if let Some(growth) = &qcow2.growth {
        add(
            "growth",
            json!({
                "sampled-clusters": growth.sampled_clusters,
                "blocks": growth.blocks,
                "changed-blocks": growth.changed_blocks,
                "factor": growth.factor(),
                "factor-with-subclusters": growth.subcluster_factor(),
            }),
        );
    }
    Value::Object(members)
}

fn clusters(qcow2: &Qcow2Facts) -> Value {
    let disk = &qcow2.survey.disk;
    json!({
        "total": disk.total_clusters,
        "data": disk.data_clusters,
        "partial": disk.partial_clusters,
        "allocated-subclusters": disk.allocated_subclusters,
        "zero-subclusters": disk.zero_subclusters,
        "compressed": disk.compressed_clusters,
        "compressed-bytes": disk.compressed_bytes,
        "zero": disk.zero_clusters,
        "zero-with-place": disk.zero_with_place_clusters,
        "shared-with-snapshots": disk.shared_clusters,
        "extents": disk.extents,
        "invalid": disk.invalid_clusters,
    })
}

fn metadata(qcow2: &Qcow2Facts) -> Value {
    let metadata = &qcow2.survey.metadata;
    json!({
        "total": metadata.total(),
        "header": metadata.header,
        "l1": metadata.l1,
        "l2": metadata.l2,
        "refcount-table": metadata.refcount_table,
        "refcount-blocks": metadata.refcount_blocks,
        "snapshot-table": metadata.snapshot_table,
        "snapshot-l1": metadata.snapshot_l1,
        "snapshot-l2": metadata.snapshot_l2,
        "bitmaps": metadata.bitmaps,
        "encryption": metadata.encryption,
        "write-log": metadata.write_log,
    })
}

fn check(qcow2: &Qcow2Facts) -> Value {
    match &qcow2.check {
        None => Value::Null,
        Some(Err(why)) => json!({ "error": why }),
        Some(Ok(report)) => json!({
            "corruptions": report.corruptions,
            "leaks": report.leaks,
            "check-errors": report.check_errors,
        }),
    }
}

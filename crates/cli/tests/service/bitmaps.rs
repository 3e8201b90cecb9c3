//! Exports that show bitmaps, and come back with what they stand on.

use serde_json::{Value, json};

use crate::dirty;
use crate::place::{Place, Service};
use crate::state::{again, export, node, snapshot, start};

/// An export of a node that shows a bitmap.
fn showing(node: &str, bitmap: &str) -> Value {
    let mut shown = export("e", node);
    shown["bitmaps"] = json!([bitmap]);
    shown
}

/// What an export calls dirty: offsets and lengths.
fn dirty(place: &Place, bitmap: &str) -> Vec<(u64, u64)> {
    let map = format!("--map=qemu:dirty-bitmap:{bitmap}");
    let words = [&*map, "--json", "nbd+unix:///e?socket=nbd.sock"];
    dirty::extents(&place.must("nbdinfo", &words))
}

const ALL: [(u64, u64); 1] = [(0, 1 << 20)];

fn expect_told(service: &Service, bitmap: &str) {
    let told = format!("the export 'e' shows all of '{bitmap}' as dirty: ");
    assert!(service.log().contains(&told), "{}", service.log());
}

#[test]
fn a_bitmap_in_memory_is_gone_and_its_export_is_not() {
    let place = Place::new();
    let (service, mut client) = start(&place);
    client.must("blockdev-add", node("a", "a"));
    let bitmap = json!({"node": "a", "name": "b"});
    client.must("block-dirty-bitmap-add", bitmap.clone());
    client.must("block-export-add", showing("a", "b"));
    assert_eq!(dirty(&place, "b"), []);
    service.end();
    let (service, mut client) = start(&place);
    expect_told(&service, "b");
    assert_eq!(dirty(&place, "b"), ALL);
    // Whoever asks for one that is not there is told so, as before.
    let mut other = showing("a", "c");
    other["id"] = json!("f");
    other["name"] = json!("f");
    let why = client.refused("block-export-add", other);
    assert_eq!(why, "Bitmap 'c' is not found");
    let (service, client) = again(&place, service);
    assert_eq!(dirty(&place, "b"), ALL);
    drop(client);
    service.end();
}

#[test]
fn a_bitmap_whose_node_is_gone_ends_no_start() {
    let place = Place::new();
    let (service, mut client) = start(&place);
    client.must("blockdev-add", node("a", "a"));
    let bitmap = json!({"node": "a", "name": "b", "persistent": true});
    client.must("block-dirty-bitmap-add", bitmap);
    client.must("block-export-add", showing("a", "b"));
    client.must("blockdev-snapshot-sync", snapshot("a", "over"));
    place.io("e", &["write -P 5 0 64k", "flush"]);
    client.must("block-stream", json!({"job-id": "j", "device": "over"}));
    client.take_event("BLOCK_JOB_COMPLETED");
    client.must("blockdev-del", json!({"node-name": "a"}));
    let (service, client) = again(&place, service);
    expect_told(&service, "b");
    assert_eq!(dirty(&place, "b"), ALL);
    place.io("e", &["read -P 5 0 64k"]);
    drop(client);
    service.end();
}

#[test]
fn a_node_that_was_made_writable_under_a_shown_bitmap_ends_no_start() {
    let place = Place::new();
    let (service, mut client) = start(&place);
    let mut disk = node("a", "a");
    client.must("blockdev-add", disk.clone());
    let bitmap = json!({"node": "a", "name": "b", "persistent": true});
    client.must("block-dirty-bitmap-add", bitmap);
    disk["read-only"] = json!(true);
    client.must("blockdev-reopen", json!({"options": [disk]}));
    let mut shown = showing("a", "b");
    shown["writable"] = json!(false);
    client.must("block-export-add", shown);
    disk["read-only"] = json!(false);
    client.must("blockdev-reopen", json!({"options": [disk]}));
    let (service, mut client) = again(&place, service);
    assert!(!service.log().contains("as dirty"), "{}", service.log());
    client.must("block-export-add", {
        let mut writable = export("w", "a");
        writable["bitmaps"] = json!(["b"]);
        writable
    });
    place.io("w", &["write -P 5 64k 64k", "flush"]);
    assert_eq!(dirty(&place, "b"), [(1 << 16, 1 << 16)]);
    drop(client);
    service.end();
}

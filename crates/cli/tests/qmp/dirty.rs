//! What exports say of dirty bitmaps.

use serde_json::Value;

/// The dirty extents, offsets and lengths, of a map that `nbdinfo --map=qemu:dirty-bitmap:NAME --json` prints.
pub fn extents(map: &str) -> Vec<(u64, u64)> {
    let map: Value = serde_json::from_str(map).expect("JSON");
    let extents = map.as_array().expect("extents").iter();
    let number = |extent: &Value, key: &str| extent[key].as_u64().expect("a number");
    extents
        .filter(|extent| extent["type"] == 1)
        .map(|extent| (number(extent, "offset"), number(extent, "length")))
        .collect()
}

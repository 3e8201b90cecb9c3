//! Sizes and indexes that follow from a geometry.

use vellum_format::{Geometry, GuestCluster, GuestOffset, HostOffset, limits};

fn geometry(cluster_bits: u32, extended_l2: bool, refcount_order: u32) -> Geometry {
    Geometry::new(3, cluster_bits, extended_l2, refcount_order, false).expect("within limits")
}

#[test]
fn default_sizes() {
    let g = geometry(16, false, 4);
    assert_eq!(g.cluster_size_bytes(), 65536);
    assert_eq!((g.l2_entry_size_bytes(), g.l2_entries()), (8, 8192));
    assert_eq!(g.bytes_per_l2_table(), 512 << 20);
    assert_eq!((g.refcount_bits(), g.max_refcount()), (16, 65535));
    assert_eq!(g.refcount_block_entries(), 32768);
    assert_eq!(g.bytes_per_refcount_block(), 2 << 30);
    assert_eq!(
        (g.subclusters_per_cluster(), g.subcluster_size_bytes()),
        (1, 65536)
    );
    assert_eq!(g.table_entries_per_cluster(), 8192);
    assert_eq!(g.clusters_for(65537), 2);
}

#[test]
fn extended_sizes() {
    let g = geometry(16, true, 4);
    assert_eq!((g.l2_entry_size_bytes(), g.l2_entries()), (16, 4096));
    assert_eq!(
        (g.subclusters_per_cluster(), g.subcluster_size_bytes()),
        (32, 2048)
    );
    assert_eq!(g.subcluster_index(GuestOffset(0x1_2345)), 4);
    assert_eq!(g.offset_in_subcluster(0x1_2345), 0x345);
}

#[test]
fn refcount_widths() {
    let entries: Vec<_> = (0..=6).map(|order| geometry(9, false, order)).collect();
    let counts: Vec<_> = entries
        .iter()
        .map(Geometry::refcount_block_entries)
        .collect();
    assert_eq!(counts, [4096, 2048, 1024, 512, 256, 128, 64]);
    let maxima: Vec<_> = entries.iter().map(Geometry::max_refcount).collect();
    assert_eq!(maxima, [1, 3, 15, 255, 65535, u32::MAX.into(), u64::MAX]);
    assert_eq!(entries[6].refcount_table_index(64), 1);
    assert_eq!(entries[6].refcount_block_index(65), 1);
}

#[test]
fn indexes() {
    let g = geometry(9, false, 4);
    let offset = GuestOffset((3 << 15) + (5 << 9) + 7);
    assert_eq!((g.l1_index(offset), g.l2_index(offset)), (3, 5));
    assert_eq!(
        (offset.in_cluster(&g), offset.cluster(&g)),
        (7, GuestCluster(197))
    );
    assert_eq!(offset.cluster_start(&g), GuestOffset(197 * 512));
    assert_eq!(
        GuestCluster(197).checked_start(&g),
        Some(offset.cluster_start(&g))
    );
    assert_eq!(GuestCluster(u64::MAX).checked_start(&g), None);
}

#[test]
fn l1_tables() {
    let g = geometry(9, false, 4);
    assert_eq!(g.l1_entries_for(0), 0);
    assert_eq!(g.l1_entries_for(32768), 1);
    assert_eq!(g.l1_entries_for(32769), 2);
    assert_eq!(g.max_size_bytes(), 128 << 30);
    assert_eq!(geometry(21, false, 4).max_size_bytes(), 1 << 61);
}

#[test]
fn limits_are_enforced() {
    let new = |bits, extended, order| Geometry::new(3, bits, extended, order, false).is_ok();
    assert!(new(9, false, 0) && new(21, true, 6) && new(14, true, 4));
    assert!(!new(8, false, 4) && !new(22, false, 4) && !new(13, true, 4) && !new(16, false, 7));
    assert!(Geometry::new(4, 16, false, 4, false).is_err());
    assert!(Geometry::new(2, 16, true, 4, false).is_err());
}

#[test]
fn offsets_do_not_overflow() {
    let end = HostOffset(u64::MAX);
    assert_eq!(end.checked_add(1), None);
    assert_eq!(HostOffset(1).checked_sub(2), None);
    assert_eq!(HostOffset(7).checked_offset_from(HostOffset(3)), Some(4));
    assert!(HostOffset(limits::HOST_OFFSET_END).is_aligned(512));
    assert_eq!(
        format!("{:#x} {}", HostOffset(255), HostOffset(255)),
        "0xff 255"
    );
}

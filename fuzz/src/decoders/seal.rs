//! The check of seals and manifests.

use vellum_format::limits;
use vellum_format::seal::{NODE_BYTES, Node, SealPointer, Shape, Superblock, node_hash};

/// Byte 0 says what follows: the data of the header extension, or a block, which is taken for a
/// superblock (with its checksum put right) and for a node.
///
/// - A pointer is the start of a cluster, and survives encoding.
/// - A superblock survives encoding; its roots lie inside its area; its statement has a line for
///   each fact.
/// - Entries of a node lie inside the area, and a node whose hash is another is none.
/// - What is under a node is under the one that leads to it.
pub fn check(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else {
        return;
    };
    if kind & 1 == 0 {
        let cluster_bytes = 1 << (limits::MIN_CLUSTER_BITS + u32::from(kind >> 1) % 13);
        if let Ok(pointer) = SealPointer::decode(rest, cluster_bytes) {
            assert!(pointer.offset_bytes != 0 && pointer.offset_bytes % cluster_bytes == 0);
            assert!(pointer.offset_bytes + pointer.length_bytes <= i64::MAX as u64);
            assert_eq!(pointer.encode(), rest);
        }
        return;
    }
    let mut block = rest.to_vec();
    block.resize(NODE_BYTES, 0);
    check_node(&block);
    let sum = Superblock::checksum(&block);
    block[NODE_BYTES - sum.len()..].copy_from_slice(&sum);
    let Ok(superblock) = Superblock::decode(&block) else {
        return;
    };
    let encoded = superblock
        .encode()
        .expect("a signature that was there fits");
    assert_eq!(Superblock::decode(&encoded).as_ref(), Ok(&superblock));
    for root in [superblock.content, superblock.mapping]
        .into_iter()
        .flatten()
    {
        assert!(root.offset_bytes != 0 && root.offset_bytes % NODE_BYTES as u64 == 0);
        assert!(root.offset_bytes + NODE_BYTES as u64 <= superblock.length_bytes);
    }
    let lines = if superblock.detached { 6 } else { 8 };
    assert_eq!(superblock.statement().lines().count(), lines);
    check_shape(superblock.content_shape());
    check_shape(superblock.mapping_shape());
}

fn check_node(block: &[u8]) {
    for level in 0..3 {
        let hash = node_hash(level, block);
        let node = Node::checked(block, level, &hash).expect("its own hash");
        let mut other = hash;
        other[0] ^= 1;
        assert_eq!(Node::checked(block, level, &other), None);
        for index in 0..64 {
            let len_bytes = 1 << 20;
            if let Ok(Some(entry)) = node.entry(index, len_bytes) {
                assert!(entry.offset_bytes + NODE_BYTES as u64 <= len_bytes);
            }
        }
    }
}

fn check_shape(shape: Shape) {
    let last = shape.leaves.saturating_sub(1) / 128;
    for number in [0, last / 2, last] {
        for level in 1..=shape.depth {
            let (above, index) = shape.step(level, number);
            let (under, own) = (
                shape.leaves_under(level, above),
                shape.leaves_under(0, number),
            );
            assert!(index < 64 && under.start <= own.start && own.end <= under.end);
        }
    }
    assert_eq!(shape.leaves_under(shape.depth, 0), 0..shape.leaves);
}

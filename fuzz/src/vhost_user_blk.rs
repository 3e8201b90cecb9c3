//! A queue of a guest that means harm, as its bytes lie in memory.

use vellum_export::vhost_user_blk::take_apart;

/// Memory of the guest, with its rings.
const MEMORY_BYTES: usize = 64 << 10;
const AVAILABLE_AT: usize = 16 << 10;
/// More than this no request may have.
const MOST_RANGES: usize = 1024;

/// The first byte says how long the queue is and whether tables may be indirect; the next two how
/// many bytes of the available ring follow, and then come the descriptors.
///
/// Invariants:
/// - no bytes make it panic or go on for ever;
/// - no more requests than the queue has entries, none of more ranges than there may be.
pub fn check_vhost_user_blk(data: &[u8]) {
    let [first, low, high, rest @ ..] = data else {
        return;
    };
    let size = 1_u16 << (first % 9);
    let available = usize::from(u16::from_le_bytes([*low, *high]))
        .min(rest.len())
        .min(4096);
    let (available, descriptors) = rest.split_at(available);
    let mut memory = vec![0; MEMORY_BYTES];
    memory[AVAILABLE_AT..][..available.len()].copy_from_slice(available);
    let mut at = 0;
    // What does not fit below the rings lies behind them, for chains that lead there.
    for part in descriptors.chunks(AVAILABLE_AT).take(2) {
        memory[at..][..part.len()].copy_from_slice(part);
        at += 2 * AVAILABLE_AT;
    }
    let taken = take_apart(&memory, size, first & 0x80 != 0).expect("memory");
    assert!(taken.requests <= usize::from(size), "{taken:?}");
    assert!(
        taken.ranges <= (taken.requests + 1) * MOST_RANGES,
        "{taken:?}"
    );
}

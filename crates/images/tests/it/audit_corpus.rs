//! The corpus of the `audit` fuzz target without a fuzzer, under several policies, and every
//! input of it with single bytes of its image's first sectors changed.

#[path = "../../../../fuzz/src/audit.rs"]
mod audit;
// Its other functions belong to another target.
#[allow(dead_code)]
#[path = "../../../../fuzz/src/image.rs"]
mod image;

use std::fs;
use std::path::Path;

/// Bytes of an input that are changed one by one: header and extensions.
const CHANGED_BYTES: usize = 130;

#[test]
fn the_corpus_and_its_neighbours_are_judged() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/audit");
    let mut inputs = 0;
    for entry in fs::read_dir(corpus).expect("read the corpus") {
        let mut bytes = fs::read(entry.expect("an entry").path()).expect("read an input");
        inputs += 1;
        for choice in (0..64).step_by(9) {
            bytes[0] = choice;
            audit::check_audit(&bytes);
        }
        for at in 0..bytes.len().min(CHANGED_BYTES) {
            let old = bytes[at];
            bytes[at] ^= 0xff;
            audit::check_audit(&bytes);
            bytes[at] = old;
        }
    }
    assert!(inputs > 0, "the corpus is empty");
}

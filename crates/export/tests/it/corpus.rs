//! The corpus of the `nbd` fuzz target without a fuzzer, and every input of it
//! cut short and with each byte changed.

#[path = "../../../../fuzz/src/nbd.rs"]
mod nbd;

use std::fs;
use std::path::Path;

#[test]
fn the_corpus_and_its_neighbours_are_taken_or_refused() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/nbd");
    let mut inputs = 0;
    for entry in fs::read_dir(corpus).expect("read the corpus") {
        let bytes = fs::read(entry.expect("an entry").path()).expect("read an input");
        inputs += 1;
        nbd::check_nbd(&bytes);
        for at in 0..bytes.len() {
            nbd::check_nbd(&bytes[..at]);
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut changed = bytes.clone();
                changed[at] = value;
                nbd::check_nbd(&changed);
            }
        }
    }
    assert!(inputs > 0, "the corpus is empty");
}

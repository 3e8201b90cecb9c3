//! The corpus of the `options` fuzz target without a fuzzer, and every input of it
//! cut short and with each byte changed.

#[path = "../../../../fuzz/src/options.rs"]
mod options;

use std::fs;
use std::path::Path;

#[test]
fn the_corpus_and_its_neighbours_are_taken_or_refused() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/options");
    let mut inputs = 0;
    for entry in fs::read_dir(corpus).expect("read the corpus") {
        let bytes = fs::read(entry.expect("an entry").path()).expect("read an input");
        inputs += 1;
        options::check_options(&bytes);
        for at in 0..bytes.len() {
            options::check_options(&bytes[..at]);
            for value in *b",=.\"'{-9\xff" {
                let mut changed = bytes.clone();
                changed[at] = value;
                options::check_options(&changed);
            }
        }
    }
    assert!(inputs > 0, "the corpus is empty");
}

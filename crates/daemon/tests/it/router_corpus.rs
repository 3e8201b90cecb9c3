//! The corpus of the `router` fuzz target without a fuzzer, and every input of it cut short and with
//! each byte changed.

#[path = "../../../../fuzz/src/router.rs"]
mod router;

use std::fs;
use std::path::Path;

#[test]
fn the_corpus_and_its_neighbours_are_understood_or_refused() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/router");
    let mut inputs = 0;
    for entry in fs::read_dir(corpus).expect("read the corpus") {
        let bytes = fs::read(entry.expect("an entry").path()).expect("read an input");
        inputs += 1;
        router::check_router(&bytes);
        for at in 0..bytes.len() {
            router::check_router(&bytes[..at]);
            for value in *b"/.%?&=+ \n{}[]\"0\\\xff" {
                let mut changed = bytes.clone();
                changed[at] = value;
                router::check_router(&changed);
            }
        }
    }
    assert!(inputs > 0, "the corpus is empty");
}

//! The corpus of the fuzz target `files` without a fuzzer: every input, cut short, and with random
//! bytes that are the same every time.

#[path = "../../../fuzz/src/files.rs"]
mod files;

use std::fs;
use std::path::Path;

use files::check_files;

#[test]
fn the_corpus_and_its_neighbours_end() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/files");
    let mut random = fastrand::Rng::with_seed(17);
    let mut inputs = 0;
    for entry in fs::read_dir(corpus).expect("read the corpus") {
        let bytes = fs::read(entry.expect("an entry").path()).expect("read an input");
        inputs += 1;
        check_files(&bytes);
        for _ in 0..30 {
            check_files(&bytes[..random.usize(..bytes.len())]);
        }
        for _ in 0..300 {
            let mut changed = bytes.clone();
            for _ in 0..random.usize(1..6) {
                let at = random.usize(..changed.len());
                changed[at] = random.u8(..);
            }
            check_files(&changed);
        }
    }
    assert!(inputs > 0, "the corpus is empty");
}

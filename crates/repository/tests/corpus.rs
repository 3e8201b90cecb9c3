//! The fuzz target's check without a fuzzer: over its corpus, and over arbitrary bytes.

#[path = "../../../fuzz/src/repository.rs"]
mod repository;

use std::path::Path;

use proptest::prelude::*;

#[test]
fn the_corpus_holds() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/repository");
    let mut count = 0;
    for file in std::fs::read_dir(corpus).expect("the target has a corpus") {
        let path = file.expect("a file").path();
        eprintln!("{}", path.display());
        let bytes = std::fs::read(&path).expect("a readable file");
        repository::check_repository(&bytes);
        // Every byte of it may be another one.
        for at in 0..bytes.len().min(512) {
            let mut other = bytes.clone();
            other[at] ^= 0x41;
            repository::check_repository(&other);
            repository::check_repository(&other[..at]);
        }
        count += 1;
    }
    assert!(count > 4, "the corpus is too small");
}

proptest! {
    #[test]
    fn arbitrary_bytes_hold(data in prop::collection::vec(any::<u8>(), 0..300)) {
        repository::check_repository(&data);
    }
}

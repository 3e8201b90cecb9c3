//! The corpus of the `image` fuzz target without a fuzzer: open, read everything,
//! check.

#[path = "../../../../fuzz/src/image.rs"]
mod image;

use std::path::Path;
use std::sync::Arc;

use vellum::ErrorKind;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::storage::MemStorage;

#[test]
fn corpus_holds() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/image");
    let mut count = 0;
    for file in std::fs::read_dir(corpus).expect("the target has a corpus") {
        let path = file.expect("a file").path();
        eprintln!("{}", path.display());
        image::check_image(&std::fs::read(&path).expect("a readable file"));
        count += 1;
    }
    assert!(count > 0, "the corpus is empty");
}

#[test]
fn tables_laid_over_each_other_end_a_check() {
    let records = include_bytes!("../../../../fuzz/corpus/image/overlapping-l2-tables");
    let storage = Arc::new(MemStorage::with_bytes(image::unpack(records)));
    image::run(async move {
        let error = check(storage, &CheckOptions::default()).await;
        assert_eq!(
            error.expect_err("too much to read").kind(),
            ErrorKind::Corrupt
        );
    });
}

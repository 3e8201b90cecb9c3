//! The corpus of the `image` fuzz target without a fuzzer: open, read everything,
//! check.

#[path = "../../../fuzz/src/image.rs"]
mod image;

use std::path::Path;

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

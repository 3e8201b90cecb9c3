//! The corpora of the fuzz targets of files without a fuzzer: every input, cut short, and with random
//! bytes that are the same every time.

#[path = "../../../fuzz/src/files.rs"]
mod files;

use std::fs;
use std::path::Path;

use files::ALL;

#[test]
fn the_corpora_and_their_neighbours_end() {
    for (name, check) in ALL {
        replay(name, check);
    }
}

fn replay(name: &str, check: files::Check) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(name);
    let mut random = fastrand::Rng::with_seed(17);
    let mut inputs = 0;
    for entry in fs::read_dir(corpus).expect("read the corpus") {
        let bytes = fs::read(entry.expect("an entry").path()).expect("read an input");
        inputs += 1;
        check(&bytes);
        for _ in 0..30 {
            check(&bytes[..random.usize(..bytes.len())]);
        }
        for _ in 0..300 {
            let mut changed = bytes.clone();
            for _ in 0..random.usize(1..6) {
                let at = random.usize(..changed.len());
                changed[at] = random.u8(..);
            }
            check(&changed);
        }
    }
    assert!(inputs > 0, "the corpus of {name} is empty");
}

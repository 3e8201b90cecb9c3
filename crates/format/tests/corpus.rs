//! The fuzz targets' checks without a fuzzer: over their corpora, and over
//! arbitrary bytes.

#[path = "../../../fuzz/src/decoders.rs"]
mod decoders;

use proptest::prelude::*;
use std::path::Path;

#[test]
fn corpora_hold() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    for (name, check) in decoders::ALL {
        let mut count = 0;
        for file in std::fs::read_dir(corpus.join(name)).expect("the target has a corpus") {
            let path = file.expect("a file").path();
            eprintln!("{}", path.display());
            check(&std::fs::read(&path).expect("a readable file"));
            count += 1;
        }
        assert!(count > 0, "the corpus of {name} is empty");
    }
}

#[test]
fn headers_cut_anywhere_are_refused_or_read_as_zeros() {
    let whole = include_bytes!("data/v3-backing.header");
    for end in 0..whole.len() {
        decoders::check_header(&whole[..end]);
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_hold(data in prop::collection::vec(any::<u8>(), 0..300)) {
        for (_, check) in decoders::ALL {
            check(&data);
        }
    }

    /// Most arbitrary bytes fail at the magic; these reach the fields.
    #[test]
    fn headers_with_arbitrary_patches_hold(
        patches in prop::collection::vec((0usize..480, any::<u8>()), 1..6),
    ) {
        let mut header = include_bytes!("data/v3-bitmaps.header").to_vec();
        for (at, value) in patches {
            header[at] = value;
        }
        decoders::check_header(&header);
    }
}

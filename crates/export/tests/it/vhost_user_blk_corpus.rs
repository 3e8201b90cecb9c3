//! The corpus of the fuzz target `vhost_user_blk` without a fuzzer: every input, cut short, with
//! each byte changed, and with random bytes that are the same every time.

#[path = "../../../../fuzz/src/vhost_user_blk.rs"]
mod vhost_user_blk;

use std::fs;
use std::path::Path;

use vhost_user_blk::check_vhost_user_blk;

#[test]
fn the_corpus_and_its_neighbours_end() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/vhost_user_blk");
    let mut random = fastrand::Rng::with_seed(17);
    let mut inputs = 0;
    for entry in fs::read_dir(corpus).expect("read the corpus") {
        let bytes = fs::read(entry.expect("an entry").path()).expect("read an input");
        inputs += 1;
        check_vhost_user_blk(&bytes);
        for at in 0..bytes.len().min(80) {
            check_vhost_user_blk(&bytes[..at]);
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut changed = bytes.clone();
                changed[at] = value;
                check_vhost_user_blk(&changed);
            }
        }
        for _ in 0..300 {
            let mut changed = bytes.clone();
            for _ in 0..random.usize(1..6) {
                let at = random.usize(..changed.len());
                changed[at] = random.u8(..);
            }
            check_vhost_user_blk(&changed);
        }
    }
    assert!(inputs > 0, "the corpus is empty");
}

//! The corpus of the `qmp` fuzz target without a fuzzer: every session, in pieces of several
//! lengths, cut short and with bytes changed.

#[path = "../../../../fuzz/src/qmp.rs"]
mod qmp;

use std::fs;
use std::path::Path;

/// How far apart the places are that are changed: some hundred sessions in all.
const STRIDE: usize = 37;

#[test]
fn a_monitor_outlives_every_session() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/qmp");
    let mut inputs = 0;
    for entry in fs::read_dir(corpus).expect("read the corpus") {
        let path = entry.expect("an entry").path();
        let bytes = fs::read(&path).expect("read an input");
        inputs += 1;
        if path.ends_with("huge") {
            // What has begun on a grain of devices of petabytes takes its time to end.
            qmp::check_qmp(&bytes);
            continue;
        }
        for piece in [1, 64, 255] {
            let mut session = bytes.clone();
            session[0] = piece;
            qmp::check_qmp(&session);
        }
        for at in (1..bytes.len()).step_by(STRIDE) {
            qmp::check_qmp(&bytes[..at]);
            for value in *b"\"{}9\xff" {
                let mut changed = bytes.clone();
                changed[at] = value;
                qmp::check_qmp(&changed);
            }
        }
    }
    assert!(inputs > 0, "the corpus is empty");
}

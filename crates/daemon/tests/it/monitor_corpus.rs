//! The corpus of the `monitor` fuzz target without a fuzzer: every script, cut short and with
//! bytes changed.

#[path = "../../../../fuzz/src/monitor.rs"]
mod monitor;

use std::fs;
use std::path::Path;

/// How far apart the places are that are changed.
const STRIDE: usize = 5;

#[test]
fn a_monitor_outlives_every_script() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/monitor");
    let mut inputs = 0;
    for entry in fs::read_dir(corpus).expect("read the corpus") {
        let path = entry.expect("an entry").path();
        let bytes = fs::read(&path).expect("read an input");
        inputs += 1;
        monitor::check_monitor(&bytes);
        for at in (1..bytes.len()).step_by(STRIDE) {
            monitor::check_monitor(&bytes[..at]);
            for value in [3, 6, 7] {
                let mut changed = bytes.clone();
                changed[at] = value;
                monitor::check_monitor(&changed);
            }
        }
    }
    assert!(inputs > 0, "the corpus is empty");
}

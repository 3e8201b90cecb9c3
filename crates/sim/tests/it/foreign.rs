//! Power cuts of images of other programs: a slice of what `vellum-sim --format NAME` plays.

use vellum_sim::Explorer;
use vellum_sim::foreign::FORMATS;

#[test]
fn no_flushed_byte_is_lost() {
    for format in FORMATS {
        let explorer = Explorer::foreign(*format);
        for seed in 0..20 {
            if let Err(found) = explorer.seed(seed, 20) {
                panic!("{} seed {seed}: {}", format.name, found.failure);
            }
        }
    }
}

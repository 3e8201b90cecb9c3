//! Servers that are killed.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use crate::place::Place;

const BLOCK: usize = 4096;

/// What was synced, or written through, is there when the server is killed; what a dead
/// server has left mounted is replaced.
#[test]
fn acknowledged_syncs_hold_and_dead_mounts_are_replaced() {
    let place = Place::new("8M");
    let mut model = vec![0; 8 << 20];
    for round in 0..10_u8 {
        let mut server = place.mount(&[]);
        let mut options = File::options();
        let is_through = round % 2 == 1;
        if is_through {
            options.custom_flags(libc::O_DSYNC);
        }
        let file = options.read(true).write(true).open(place.path("disk"));
        let file = file.expect("the disk");
        for number in 0..20 {
            let at = (usize::from(round) * 37 + number * 53) * BLOCK + 100;
            model[at..at + BLOCK].fill(round + 1);
            file.write_all_at(&model[at..at + BLOCK], at as u64)
                .expect("a write");
        }
        if !is_through {
            file.sync_data().expect("a sync");
        }
        server.signal("-KILL");
        assert_eq!(server.wait(), None);
        let dead = fs::metadata(place.path("disk")).unwrap_err();
        let errno = dead.raw_os_error().expect("an error of the system");
        assert!([libc::ENOTCONN, libc::ECONNABORTED].contains(&errno));
    }
    let server = place.mount(&[]);
    let whole = fs::read(place.path("disk")).expect("the disk");
    assert!(whole == model);
    server.end();
    place.must("qemu-img", &["check", "-q", "-r", "leaks", "image"]);
    place.check_image(&model);
}

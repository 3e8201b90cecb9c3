//! Invariants: see [`vellum_fuzz::vhost_user_blk::check_vhost_user_blk`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    vellum_fuzz::vhost_user_blk::check_vhost_user_blk(data);
});

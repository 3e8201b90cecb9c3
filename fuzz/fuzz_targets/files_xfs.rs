//! Invariants: see [`vellum_fuzz::files::check_xfs`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    vellum_fuzz::files::check_xfs(data);
});

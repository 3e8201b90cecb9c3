//! Invariants: see [`vellum_fuzz::options::check_options`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::options::check_options(data));

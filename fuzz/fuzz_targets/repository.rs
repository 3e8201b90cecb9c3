//! Invariants: see [`vellum_fuzz::repository::check_repository`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::repository::check_repository(data));

//! Invariants: see [`vellum_fuzz::nbd::check_nbd`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::nbd::check_nbd(data));

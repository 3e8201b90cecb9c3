//! Invariants: see [`vellum_fuzz::decoders::check_luks_header`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::decoders::check_luks_header(data));

//! Invariants: see [`vellum_fuzz::decoders::check_seal`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::decoders::check_seal(data));

//! Invariants: see [`vellum_fuzz::decoders::checksums::check`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::decoders::checksums::check(data));

//! Invariants: see [`vellum_fuzz::decoders::stream::check`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::decoders::stream::check(data));

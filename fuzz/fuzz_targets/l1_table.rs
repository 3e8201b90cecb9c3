//! Invariants: see [`vellum_fuzz::decoders::check_l1_table`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::decoders::check_l1_table(data));

//! Invariants: see [`vellum_fuzz::foreign::check_package`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::foreign::check_package(data));

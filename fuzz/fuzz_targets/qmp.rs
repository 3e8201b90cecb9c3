//! Invariants: see [`vellum_fuzz::qmp::check_qmp`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::qmp::check_qmp(data));

//! Invariants: see [`vellum_fuzz::monitor::check_monitor`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::monitor::check_monitor(data));

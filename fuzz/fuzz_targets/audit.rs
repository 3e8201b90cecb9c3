//! Invariants: see [`vellum_fuzz::audit::check_audit`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::audit::check_audit(data));

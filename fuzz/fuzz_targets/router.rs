//! Invariants: see [`vellum_fuzz::router::check_router`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::router::check_router(data));

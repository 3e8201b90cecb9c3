//! Invariants: see [`vellum_fuzz::nbd_server::check_nbd_server`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::nbd_server::check_nbd_server(data));

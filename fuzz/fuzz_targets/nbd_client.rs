//! Invariants: see [`vellum_fuzz::nbd_client::check_nbd_client`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::nbd_client::check_nbd_client(data));

//! Invariants: see [`vellum_fuzz::image::check_image`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vellum_fuzz::image::check_image(data));

//! A folder in which our programs and QEMU's are run. Other tests that run both take it from here.

use std::ops::Deref;

use vellum_testing::Folder;

pub const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

pub struct Place(Folder);

impl Deref for Place {
    type Target = Folder;

    fn deref(&self) -> &Folder {
        &self.0
    }
}

impl Place {
    pub fn new() -> Self {
        Place(Folder::new(VELLUM))
    }
}

//! Images of other programs' formats as engines under test, and scenarios for them: plain requests,
//! flushes, failures of the disk, and power cuts.
//!
//! What no image of a format may show after a cut is what its check calls damage, but for what the format
//! cannot keep in step and `docs/FORMATS.md` says so: that counts as leaks here.

mod format;
mod formats;

pub use format::ForeignFormat;
pub use formats::FORMATS;

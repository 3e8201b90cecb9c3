//! Persistent dirty bitmaps: right through every change of an open image, and through
//! its crash.
//!
//! An enabled bitmap has two forms while the image is open for writing: the *dirty*
//! bits in memory, which are exact, and those on disk, which hold at least as much.
//! Before the first byte of a clean range is written, the bits of a whole region around
//! it are set on disk, durably; then the regions are *covered*, and writes to them
//! touch memory alone. The regions grow with the number of times that this was needed,
//! so that a writer waits for it seldom. The close writes the exact bits.
//!
//! On disk such a bitmap is *in use*, which tells QEMU not to trust it. An autoclear
//! bit of our own tells Vellum that it may: whoever does not know the bit clears it
//! before the first change (`crash_consistent`; FORMAT.md, I43).
//!
//! | file | what it does |
//! | --- | --- |
//! | `track` | sets bits on disk before the data, in regions (rule 4) |
//! | `state`, `dirty`, `bits` | the enabled bitmaps in memory |
//! | `close` | leaves bitmaps behind that everybody may trust |
//! | `crash_consistent` | who may trust a bitmap that is in use, after a crash |
//! | `change` | adding, removing, clearing, enabling, disabling and merging |
//! | `relocate` | bitmaps in new places further down in the file (`compact`) |
//! | `resize` | bitmaps of an image that gets another size |
//! | `store` | bits from the disk and to new places on it; the directory |
//! | `api`, `view` | bitmaps as the library shows them; asked about piece by piece |
//! | `memory` | bitmaps of any device, which are not in the image |
//!
//! Invariants:
//! - A bit in memory is set only once it is durable on disk.
//! - Bytes of the guest change only after every enabled bitmap calls them dirty, while
//!   their range is held: who holds all ranges sees no write that is half told.
//! - Clusters of a bitmap's bits and tables are written by one at a time (`layout`).
//! - Everything but setting bits, and the flag "in use", goes into new clusters and a
//!   new directory; the header's extension switches from the old to the new.

mod api;
mod bits;
mod change;
mod close;
mod crash_consistent;
mod dirty;
mod memory;
mod relocate;
mod resize;
pub(crate) mod state;
mod store;
mod track;
mod view;

pub use api::{BitmapOptions, Bitmaps, DirtyBitmap, NewBitmap};
pub(crate) use crash_consistent::is_consistent;
pub(in crate::qcow2) use crash_consistent::{list_lost, set_lost};
pub use memory::MemoryBitmap;
pub use view::BitmapView;

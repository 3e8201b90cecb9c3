//! VMDK, VMware's format, with QEMU's five kinds of images, and ESX's for reading.
//!
//! | file | what it does |
//! | --- | --- |
//! | `descriptor` | the text that names extents and parent: pure |
//! | `header`, `sesparse` | headers of extents with tables: pure |
//! | `marker` | markers, footers and compressed grains of streams: pure |
//! | `extent`, `sparse` | extents that were opened: directories, where grains are |
//! | `stream` | compressed grains, compressed side by side and placed in order |
//! | `tables` | the grain tables that are in memory, within a budget |
//! | `open`, `layout` | opens images; what the device asks |
//! | `create`, `check`, `info` | new images, checks, what is told of an image |
//!
//! An image is a descriptor and extents: files of plain bytes (flat), or of grains of mostly 64 KiB that
//! tables lead to (sparse). The descriptor is a file of its own, or inside of the only extent. It
//! names its parent, and the `CID` that the parent must have: each first write to an image changes its
//! `CID`.
//!
//! ```text
//! sparse extent   header | descriptor | directory' tables' | directory tables | grains ...
//! streamed        the same, but that grains are compressed, each behind a marker; an end-of-stream marker
//! ```
//!
//! What a power cut leaves: the new `CID` is durable before anything else is changed, in one sector that
//! is written at once. Grains are put behind all that the file had. The device writes data, a barrier,
//! the entries in both copies of the tables, and a barrier again, so no entry leads to bytes that are not
//! there. The two copies of the tables may differ until their entries change again: reads trust the
//! first, as QEMU does. Grains without an entry are lost space. A stream that was not closed has no
//! end-of-stream marker; whoever finds grains by the tables misses nothing.
//!
//! Images that come from elsewhere may have entries that lead behind the end of the file. Where such an image
//! may be changed those are errors, as new grains would be put there, too.

mod check;
mod create;
pub mod descriptor;
mod extent;
pub mod header;
mod info;
mod layout;
pub mod marker;
mod open;
pub mod sesparse;
mod sparse;
mod stream;
mod tables;

pub use check::check;
pub use create::{AdapterType, CreateOptions, Subformat, create};
pub use descriptor::{Descriptor, ExtentLine, ExtentType};
pub use layout::{VmdkChanges, VmdkLayout};
pub use open::{OpenOptions, open, probe, read_descriptor};

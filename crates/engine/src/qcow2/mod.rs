//! qcow2 images.
//!
//! [`Qcow2`] (`device`) is what the rest of the program sees; `image::Image` is what the
//! requests on one image share: the state lies in the folders' structs below it, and the
//! operations, as `impl Image`, above it.
//!
//! | file or folder | what is in it |
//! | --- | --- |
//! | `open`, `options`, `close` | an image from its files, how it is opened, and what a close does |
//! | `image` | the parts of an open image, and what all requests begin and end with |
//! | `exclusive` | work for which the whole image stands still |
//! | `encryption` | which guest data is encrypted, and how |
//! | `info`, `messages` | what is told about an image, and to users |
//! | `mapping/` | guest offsets to host offsets: the L1 table, L2 tables, lookups |
//! | `table_cache/` | L2 slices and refcount blocks in memory, and reading them ahead |
//! | `alloc/` | host clusters: refcounts, free clusters, allocation |
//! | `read/` | reading guest data, the backing chain, block status |
//! | `write/` | writing guest data and zeroes: plans, copy-on-write, linking |
//! | `write_buffer/` | guest bytes that wait for the rest of their cluster |
//! | `write_log/` | flushes by one append to another file |
//! | `compressed/` | compressed clusters |
//! | `commit/` | in which order dirty metadata reaches the disk, flushes, barriers |
//! | `integrity/` | overlap checks, corruption, what is refused after it |
//! | `header/` | the header and what is read whole: snapshot table, bitmap directory |
//! | `resize/` | changing the size |
//! | `amend/` `bitmap/` `check/` `compact/` `create/` `seal/` `snapshot/` `survey/` | one feature each |
//!
//! Invariants:
//! - No lock of a thread is held across an await. The async locks (`growing`, `writeback`,
//!   `preparing`, `resizing`, the header's) serialise rare work that no cache hit needs.

pub mod amend;
pub mod check;
pub mod compact;
pub mod create;
pub mod info;
pub mod seal;
pub mod survey;

mod alloc;
mod bitmap;
mod cache_budget;
mod caches;
pub mod checksums;
mod close;
mod commit;
mod compressed;
mod device;
mod encryption;
mod exclusive;
mod header;
mod image;
mod integrity;
mod mapping;
mod messages;
mod open;
mod options;
mod random_id;
mod read;
mod resize;
mod snapshot;
mod table_cache;
mod write;
mod write_buffer;
mod write_log;

pub use alloc::prealloc::PreallocateAhead;
pub use bitmap::{BitmapOptions, BitmapView, Bitmaps, DirtyBitmap, MemoryBitmap, NewBitmap};
pub use cache_budget::CacheBudget;
pub use compressed::compress::CompressionOptions;
pub use device::{AsQcow2, CacheCount, CacheCounts, CacheUsage, Qcow2};
pub use header::backing::BackingName;
pub(crate) use header::load::read_bytes;
pub(crate) use integrity::errors::bad_format;
pub use integrity::overlap::{Metadata, OverlapChecks};
pub use messages::{Corruption, Messages};
pub use open::{read_header, read_snapshots};
pub use options::{Backing, CacheOptions, OpenOptions, OpenPurpose};
pub use snapshot::{NewSnapshot, SnapshotSelector};
pub use write_log::WriteLogOptions;

pub use write_log::log::WriteLogUsage;

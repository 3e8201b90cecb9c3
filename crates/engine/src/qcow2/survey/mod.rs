//! Survey: what an image's own metadata tells about it as a whole. How much is mapped and
//! how, what snapshots share and what they alone hold, how much the metadata takes, what
//! an L2 cache needs to cover it, and what lies where in the file.
//!
//! Every table is read once, the L1 tables of snapshots twice; no guest data is read. The
//! refcounts are kept in the dense form of the check, and one mark for each host cluster
//! beside them: 10 TiB of 64 KiB clusters take about 80 MiB. Of a hostile image the tables
//! of snapshots are surveyed in parts, as the check does it.
//!
//! What snapshots hold alone is told by the refcounts on disk, so it is as true as these
//! are: a check comes first.
//!
//! | file | what it does |
//! | --- | --- |
//! | `report` | what is found |
//! | `walk` | goes through all tables |
//! | `tables` | what slices of L2 tables take in a cache; pure |
//! | `cells` | what lies where in the file, in equal parts |
//!
//! Invariant: nothing is written.

mod cells;
mod report;
mod tables;
mod walk;

pub use cells::HostCell;
pub use report::{CacheNeed, Mapped, MetadataBytes, SnapshotSpace, Survey, SurveyOptions};
pub use walk::survey;

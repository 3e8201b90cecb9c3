//! A cache on this host of files on other machines: what was read once is here afterwards.
//!
//! A folder holds the blocks of any number of files, each version of one in two files of its own:
//! `STEM.data`, sparse, with each block in its place; `STEM.index`, with a hash of each block that is
//! there ([`layout`]), and a table by which processes tell each other what is thrown out
//! ([`table`]). [`CacheStorage`] reads blocks that are there straight from the file; what is not
//! there is fetched once, whoever wants it, in whichever process ([`fill`]). When the folder takes
//! more than its limit, the groups that were used longest ago go ([`evict`]).
//!
//! Invariants:
//! - Bytes of one version are never shown as another's: the version is a part of the files' name and
//!   of their header.
//! - A block is used after its bytes were compared with its hash, and as long as its group was not thrown out. They are
//!   compared at every read, until a sync that began after they were there has succeeded ([`sync`]): the disk may
//!   lose before that what it has taken. So no write needs to be durable, nor to be before another one.
//! - A block is fetched under a claim on its entry; a group is thrown out under one on all of its
//!   entries. Claims end with the process that has them.
//! - A cache that cannot be written (a full disk) costs speed, and no read.
//! - Memory is bounded: [`fill::MOST_PIECES`] pieces of [`fill::PIECE_BLOCKS`] blocks are on their
//!   way at most, for each storage.

mod directory;
mod evict;
mod fill;
mod layout;
mod place;
mod storage;
mod sync;
mod table;
mod trace;

pub use storage::{CacheOptions, CacheStorage, Found};

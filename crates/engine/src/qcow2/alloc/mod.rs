//! Host clusters: which are free, and what the others are counted as.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`allocator`] | hands out clusters and takes them back |
//! | [`area`] | long runs of clusters at the end of the file, with the refcount blocks that count them |
//! | [`below`] | clusters below a limit, for whoever makes the file shorter |
//! | [`beyond`] | the clusters beyond the end of the file that entries lead to |
//! | [`changed_slices`] | what of the refcounts has changed while somebody counts |
//! | [`dirty_bit`] | sets and clears the dirty bit around the use of lazy refcounts |
//! | [`free_index`] | the free clusters that are known, as extents |
//! | [`host_room`] | pieces of tables get room in the host's file system before they change |
//! | [`lazy`] | lazy refcounts: whether counts stay in memory while the image is in use |
//! | [`leaks`] | frees what a crash has leaked, at the next open |
//! | [`prealloc`] | what is done ahead of the writes, and given back at the close |
//! | [`recount`] | refcounts lowered and raised many at a time |
//! | [`refcount_growth`] | more refcount blocks, a longer refcount table |
//! | [`refcounts`] | the refcount table in memory, refcount blocks through the cache |
//! | [`reserve`] | clusters that are counted as used and that nobody uses yet |
//! | [`streams`] | free clusters that are set aside for sequential writers |
//! | [`scan`] | finds the free clusters of an image that is opened |
//! | [`used`] | how many clusters are in use, counted while others allocate |
//! | [`unwritten`] | subclusters on disk that were never written: nothing need be written around the first bytes of these |
//!
//! Invariant: a count on disk is never lower than the references on disk; a cluster that was freed
//! is handed out again only when nothing on disk refers to it (`commit`) and nobody reads it any
//! more.

pub(crate) mod allocator;
pub(crate) mod area;
pub(crate) mod below;
pub(crate) mod beyond;
pub(crate) mod changed_slices;
pub(crate) mod dirty_bit;
pub(crate) mod free_index;
pub(crate) mod host_room;
pub(crate) mod lazy;
pub(crate) mod leaks;
pub(crate) mod prealloc;
pub(crate) mod recount;
pub(crate) mod refcount_growth;
pub(crate) mod refcounts;
pub(crate) mod reserve;
pub(crate) mod scan;
pub(crate) mod streams;
pub(crate) mod unwritten;
pub(crate) mod used;

//! What keeps a damaged or hostile image from doing more damage.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`beyond_end`] | entries that lead beyond the end of the file, seen as they are loaded: nothing new goes there |
//! | [`corruption`] | marks an image corrupt, tells users, refuses changes |
//! | [`errors`] | errors of the codecs as errors of the engine |
//! | [`fail_stop`] | when an image accepts no more changes, and why |
//! | [`overlap`] | where metadata lies, one bit a cluster, and the image file as guest data sees it, which refuses writes that would hit metadata |
//!
//! Invariant: guest data is written through [`overlap::GuardedData`], and tables only after
//! `OverlapMap::check_tables`: no write hits metadata of another kind that is checked for.

pub(crate) mod beyond_end;
pub(crate) mod corruption;
pub(crate) mod errors;
pub(crate) mod fail_stop;
pub(crate) mod overlap;

//! The header of an image, and the parts that are read whole.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`autoclear`] | the autoclear features of a file that is not an open image |
//! | [`backing`] | another backing file's name for an image in use |
//! | [`fields`] | the header's fields, changed in memory and in place on disk |
//! | [`load`] | reads header, snapshot table and bitmap directory, and checks them against the limits |
//! | [`rewrite`] | the header with its extensions and names, replaced as a whole by one sector; `Image::update_header` |
//! | [`state`] | the header in memory, and whose turn it is to write it |
//!
//! Invariant: header fields are written under [`state::HeaderState::lock_for_writing`]; what changes extensions or
//! names goes through [`rewrite`].

pub(crate) mod autoclear;
pub(crate) mod backing;
pub(crate) mod fields;
pub(crate) mod load;
pub(crate) mod rewrite;
pub(crate) mod state;

//! Reading guest data, and saying what it is made of.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`chain`] | what lies below an image as one mapping, kept by regions: a long chain costs one lookup |
//! | [`chain_index`] | regions of that mapping in memory, within a budget |
//! | [`data`] | runs a view: one piece goes straight to the storage, others side by side |
//! | [`find_layers`] | which images those are, also past links |
//! | [`layers`] | what an image knows of what lies below it |
//! | [`sparse`] | QEMU's guess about preallocated metadata |
//! | [`status`] | block status through the chain |

pub(crate) mod chain;
pub(crate) mod chain_index;
pub(crate) mod data;
mod find_layers;
pub(crate) mod layers;
pub(crate) mod sparse;
pub(crate) mod status;

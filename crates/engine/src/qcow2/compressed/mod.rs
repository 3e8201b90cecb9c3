//! Compressed clusters.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`appending`] | the one write at a time that puts compressed bytes on disk |
//! | [`cache`] | decompressed clusters that are read again, by budget of bytes |
//! | [`compress`] | the codecs and their levels: a cluster to fewer bytes, or none |
//! | [`decompress`] | the codecs: bytes to a cluster or its beginning |
//! | [`write_state`] | what the compressed writes of an image share |
//! | [`placing`] | finds and counts a place for compressed data, end to end |
//! | [`read`] | how much of the data is read, with which I/O, in which thread |
//! | [`read_state`] | what the reads of an image's compressed clusters share |
//! | [`mod@write`] | batches, threads, then a link as for any write |

pub(crate) mod appending;
pub(crate) mod cache;
pub(crate) mod compress;
pub(crate) mod decompress;
pub(crate) mod placing;
pub(crate) mod read;
pub(crate) mod read_state;
pub(crate) mod write;
pub(crate) mod write_state;

//! What is to change, and who hears how far it is.

use std::sync::Arc;

use crate::luks::KeyChange;

vellum_io::with_setters! {
    /// What to change; what is `None` stays as it is.
    ///
    /// The names are those of `qemu-img amend -o`.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct AmendOptions {
        /// `compat`: version 2 (`0.10`) or 3 (`1.1`) of the format. Images with a data
        /// file, subclusters or zstd-compressed clusters, with refcounts of other widths
        /// than 16 bits, or with snapshots of other sizes stay at version 3.
        pub version: Option<u32>,
        /// `size`: the virtual size in bytes, a multiple of 512. What lies beyond is lost.
        pub size_bytes: Option<u64>,
        /// `backing_file`: must be what the image says; `rebase` changes it.
        pub backing_file: Option<String>,
        /// `backing_fmt`: must be what the image says.
        pub backing_format: Option<String>,
        /// `data_file`: the name of the external data file of an image that has one;
        /// empty: the name is removed, and must be given whenever the image is opened.
        pub data_file: Option<String>,
        /// `data_file_raw`: can be switched off, not on.
        pub data_file_raw: Option<bool>,
        /// `lazy_refcounts`
        pub lazy_refcounts: Option<bool>,
        /// `refcount_bits`: a power of two up to 64 that holds every refcount.
        pub refcount_bits: Option<u64>,
        /// `encrypt.*`: a change of the key slots.
        pub key_slots: Option<KeyChange>,
    }
}

/// Receives how much of how much is done; the unit is any.
pub type ProgressSink = Arc<dyn Fn(u64, u64) + Send + Sync>;

//! The raw format: a storage, or a window of one, as it is.

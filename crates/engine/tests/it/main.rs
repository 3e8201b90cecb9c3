//! What an image does as a whole, in one program: linked once, and with its tests beside each other. Tests
//! that count the memory of their whole process are programs of their own.

#[path = "../common/mod.rs"]
mod common;

mod amend_after_crash;
mod beyond_the_end;
mod bitmaps;
mod blocking;
mod cache_budget;
mod chain;
mod check;
mod checksums;
mod checksums_copied;
mod checksums_healed;
mod close;
mod compact;
mod compressed;
mod create;
mod cut_short;
mod damage;
mod data_cache_faults;
mod discard;
mod error_paths;
mod every_field;
mod failing_storage;
mod fixed_length;
mod fixed_storage;
mod free_clusters;
mod full_disk;
mod guest_memory;
mod image_corpus;
mod lanes;
mod lanes_random;
mod lazy;
mod leaks;
mod leaks_synced;
mod luks;
mod model;
mod past_links;
mod repair;
mod resize;
mod same_disk;
mod seal;
mod share;
mod snapshots;
mod survey;
mod undrained;
mod unpolled;
mod write_compressed;
mod write_log_reader;

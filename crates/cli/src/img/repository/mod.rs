//! `push`, `pull`, `open` and `repo`: disks in repositories.

pub mod open;
pub mod pull;
pub mod push;
pub mod repo;
mod words;

pub(crate) use words::{disk_name, failed, find, manifest_json, named, sizes, told};

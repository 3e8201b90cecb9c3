//! What the fuzz targets do with their bytes, as plain functions.
//!
//! They need no fuzzer: `crates/format/tests/corpus.rs` includes [`decoders`] by
//! path and replays the corpora with the stable toolchain, and
//! `crates/engine/tests/it/image_corpus.rs` does so with [`image`], and
//! `crates/export/tests/corpus.rs` with [`nbd`], `crates/export/tests/sessions.rs` with
//! [`nbd_server`] and [`nbd_client`], `crates/export/tests/vhost_user_blk_corpus.rs` with [`vhost_user_blk`], `crates/control/tests/qmp_corpus.rs` with [`qmp`], `crates/control/tests/monitor_corpus.rs` with [`monitor`], and `crates/control/tests/corpus.rs`
//! with [`options`], `crates/control/tests/audit_corpus.rs` with [`audit`], `crates/control/tests/router_corpus.rs` with
//! [`router`],
//! `crates/repository/tests/corpus.rs` with [`repository`],
//! `crates/foreign/tests/it/corpus.rs` with [`foreign`],
//! and `crates/files/tests/corpus.rs` with [`files`].
#![forbid(unsafe_code)]

pub mod audit;
pub mod decoders;
pub mod files;
pub mod foreign;
pub mod image;
pub mod monitor;
pub mod nbd;
pub mod nbd_client;
pub mod nbd_server;
pub mod options;
pub mod qmp;
pub mod repository;
pub mod router;
pub mod vhost_user_blk;

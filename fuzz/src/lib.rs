//! What the fuzz targets do with their bytes, as plain functions.
//!
//! They need no fuzzer: tests include them by path, and replay the corpora with the stable toolchain.
//!
//! | test | what it includes |
//! | --- | --- |
//! | `crates/format/tests/corpus.rs` | [`decoders`] |
//! | `crates/engine/tests/it/image_corpus.rs` | [`image`] |
//! | `crates/foreign/tests/it/corpus.rs` | [`foreign`] |
//! | `crates/repository/tests/corpus.rs` | [`repository`] |
//! | `crates/export/tests/it/corpus.rs` | [`nbd`] |
//! | `crates/export/tests/it/sessions.rs` | [`nbd_server`], [`nbd_client`] |
//! | `crates/export/tests/it/vhost_user_blk_corpus.rs` | [`vhost_user_blk`] |
//! | `crates/graph/tests/it/corpus.rs` | [`options`] |
//! | `crates/graph/tests/it/audit_corpus.rs` | [`audit`] |
//! | `crates/graph/tests/it/qmp_corpus.rs` | [`qmp`] |
//! | `crates/graph/tests/it/monitor_corpus.rs` | [`monitor`] |
//! | `crates/graph/tests/it/router_corpus.rs` | [`router`] |
#![forbid(unsafe_code)]

pub mod audit;
pub mod decoders;
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

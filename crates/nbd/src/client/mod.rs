//! The client: another program's disk as a storage ([`NbdStorage`]).
//!
//! [`handshake`] agrees with the server on an export, [`Connection`] runs any
//! number of requests on one socket, `link` keeps as many connections as the
//! server allows and makes lost ones anew, and the storage cuts requests to what
//! the server takes.

mod connection;
mod connection_pool;
mod flush_tracker;
pub mod handshake;
pub mod list;
mod options;
mod split;
mod storage;

pub use connection::{Connection, Outcome, Reply, Request};
pub use handshake::Session;
pub use options::{Address, ClientOptions, Dial, connect};
pub use storage::NbdStorage;

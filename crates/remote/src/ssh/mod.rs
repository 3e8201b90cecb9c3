//! Files on other machines by SFTP, over the system's `ssh`.
//!
//! The program brings keys, agents, jump hosts, known hosts and whatever else users have set up.
//! What is spoken over its standard input and output is version 3 of the SSH File Transfer Protocol
//! (draft-ietf-secsh-filexfer-02) with OpenSSH's extensions, in this folder:
//!
//! - `wire.rs`: what messages look like;
//! - `host_key.rs` and `program.rs`: the program, its options, what it has to say;
//! - `answer.rs`: what waits for requests that are on their way;
//! - `session.rs`: a connection with an open file: requests in flight, and the two threads that send
//!   them and take the answers;
//! - `storage.rs`: the storage.
//!
//! Threads that block do the work, so nothing of tokio is used; lanes wait for wakers.

mod answer;
mod host_key;
mod options;
mod pieces;
mod program;
mod sending;
mod session;
mod storage;
mod wire;

pub use options::{HashKind, HostKeyCheck, SshOptions};
pub use storage::SshStorage;

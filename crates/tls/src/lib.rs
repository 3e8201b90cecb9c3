//! TLS around the sockets of NBD connections: X.509 certificates, pre-shared keys and,
//! where nobody minds who listens, anonymous Diffie-Hellman.
//!
//! [`Credentials`] are what a user's `--object tls-creds-…` names; [`Client`] and
//! [`Server`] secure connections with them. One library does all three kinds, OpenSSL:
//! rustls has no pre-shared keys from outside.
//!
//! Invariants:
//! - A peer is looked at after the handshake and before its first byte is used: that it has
//!   the key, or its certificate, the name in it, and who may come in.
//! - Nothing is resumed: every session proves everything anew.
//! - Keys are read once, appear in no message, and are wiped when they are dropped.
//! - No lock is held across an await, but for the turn to send.
//! - Whoever receives waits for nobody who sends.
//! - OpenSSL is loaded with the first [`Credentials`] (`library`): who needs no TLS neither
//!   waits for it nor needs it.
//! - A client shows who it is only to a server that may believe it (`choose`).
#![deny(unsafe_code)]
#![deny(clippy::missing_errors_doc)]

mod authorizer;
mod choose;
mod credentials;
mod error;
mod keys;
// Elsewhere the program is linked to OpenSSL, or contains it.
#[cfg_attr(
    not(all(
        target_os = "linux",
        target_env = "gnu",
        any(target_arch = "x86_64", target_arch = "aarch64")
    )),
    path = "linked.rs"
)]
mod library;
mod peer;
mod session;
mod upgrade;

pub use authorizer::Authorizer;
pub use credentials::{Credentials, CredentialsOptions, Endpoint, Kind};
pub use upgrade::{Client, Server};

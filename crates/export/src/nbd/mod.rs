//! An NBD server: fixed newstyle negotiation, simple, structured and extended
//! replies, every connection's requests in parallel.
//!
//! [`serve`] takes clients from [`Listener`]s and spreads them over lanes. A
//! connection is a reader, requests in flight and a sender, all on one lane:
//! the reader takes many requests from one receive, each goes straight to the
//! device, and what has completed goes out in one vectored send.
//!
//! The modules [`option`], [`request`] and [`reply`] are the protocol itself,
//! pure functions over bytes.

pub mod client;
mod connection;
mod export;
mod input;
mod lanes;
mod listener;
mod negotiate;
pub mod option;
mod outbox;
mod perform;
mod pool;
pub mod proto;
pub mod reply;
pub mod request;
mod server;
mod stop;
mod window;
pub mod wire;

pub use export::{Export, MetaContext};
pub use listener::Listener;
pub use server::{Exports, Log, ServerOptions, serve};
pub use stop::Stop;

//! An NBD server: fixed newstyle negotiation, simple, structured and extended
//! replies, every connection's requests in parallel.
//!
//! [`serve`] takes clients from [`Listener`]s and spreads them over lanes. A
//! connection is a reader, requests in flight and a sender, all on one lane:
//! the reader takes many requests from one receive, each goes straight to the
//! device, and what has completed goes out in one vectored send.
//!
//! The protocol itself, which the client shares, is [`vellum_nbd`].

mod client_handle;
mod connection;
mod export;
mod exports;
mod in_flight;
pub(crate) mod lanes;
mod listener;
mod negotiate;
mod perform;
mod pieces;
mod pool;
mod reply_queue;
mod server;
mod sessions;
mod stop;

pub use export::{Export, MetaContext};
pub use exports::Exports;
pub use listener::Listener;
pub use server::{Log, Phase, ServerOptions, serve};
pub use stop::Stop;

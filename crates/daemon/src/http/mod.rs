//! The daemon over HTTP (`--metrics`): metrics, a JSON interface, and a page for people.
//!
//! | file | what it does |
//! | --- | --- |
//! | `target`, `routes`, `call` | a request taken apart, the table of all routes, and what a request asks for |
//! | `access`, `problem` | who may, and what those are told who may not |
//! | `service`, `desk` | an answer to a request; the daemon's side of it |
//! | `moment`, `picture`, `views` | the daemon at one moment, and what is told of it as JSON |
//! | `metrics`, `exposition` | the same for Prometheus |
//! | `openapi`, `page` | the document that describes all, and the page |
//! | `message` | requests and answers |
//! | `listen`, `serve` | `--metrics`, its sockets, and who serves them |
//! | `server`, `connections`, `patient`, `tls_front` | HTTP itself, with the feature `http` |
//!
//! All but the last row knows neither sockets nor a runtime. HTTP has a thread of its own; no lane ever
//! runs it.
//!
//! Invariants:
//! - A command goes where those of monitors go (`desk`), so HTTP and QMP never race: commands change
//!   the daemon while they hold [`Daemon::parts`](super::Daemon::parts).
//! - What is only looked at takes no lock that requests on disks take, and does not wait for a command.
//! - What a client can make the daemon keep is bounded: connections, heads, bodies, answers that it
//!   does not read, and the time for each of these.
#![cfg_attr(
    not(feature = "http"),
    allow(
        dead_code,
        reason = "a build without it understands requests, and serves none"
    )
)]

mod access;
mod call;
#[cfg(feature = "http")]
mod connections;
mod desk;
mod exposition;
mod listen;
mod message;
mod metrics;
mod moment;
mod openapi;
mod page;
#[cfg(feature = "http")]
mod patient;
mod picture;
mod problem;
mod routes;
mod serve;
#[cfg(feature = "http")]
mod server;
mod service;
mod target;
#[cfg(test)]
mod tests;
#[cfg(feature = "http")]
mod tls_front;
mod views;

pub use call::{Call, understand};
pub(crate) use listen::Bound;
pub use message::Request;
pub(crate) use message::{Response, is_read};
pub use problem::Problem;
pub use routes::{Method, ROUTES, Route, Serves, Source, View};
pub use target::Target;

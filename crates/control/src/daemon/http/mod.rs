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
//! | `listen` | `--metrics` and its sockets |
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
mod metrics;
mod moment;
mod openapi;
mod page;
#[cfg(feature = "http")]
mod patient;
mod picture;
mod problem;
mod routes;
#[cfg(feature = "http")]
mod server;
mod service;
mod target;
#[cfg(test)]
mod tests;
#[cfg(feature = "http")]
mod tls_front;
mod views;

use std::rc::Rc;

use vellum_io::JoinHandle;

use super::{Daemon, Failure};
use crate::Options;

pub use call::{Call, understand};
pub(super) use listen::Bound;
pub use problem::Problem;
pub use routes::{Method, ROUTES, Route, Serves, Source, View};
pub use target::Target;

/// A request, without what nobody here looks at.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The method, as it was written.
    pub method: String,
    /// The path and the query, as they were written.
    pub target: String,
    /// The header `Host`.
    pub host: Option<String>,
    /// The header `Authorization`.
    pub authorization: Option<Vec<u8>>,
    /// The header `Content-Type`.
    pub content_type: Option<String>,
    /// What follows the headers.
    pub body: Vec<u8>,
}

/// Whether a method asks only.
fn is_read(method: &str) -> bool {
    matches!(method, "GET" | "HEAD")
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Response {
    pub(super) status: u16,
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) body: Vec<u8>,
}

impl Response {
    fn new(status: u16, content_type: &str, body: impl Into<Vec<u8>>) -> Response {
        let headers = [
            ("content-type", content_type),
            // What is told is true for a moment, and nobody else's.
            ("cache-control", "no-store"),
            ("x-content-type-options", "nosniff"),
            ("cross-origin-resource-policy", "same-origin"),
            ("referrer-policy", "no-referrer"),
        ];
        let headers = headers.map(|(name, value)| (name, value.to_owned()));
        Response {
            status,
            headers: headers.to_vec(),
            body: body.into(),
        }
    }

    fn json(text: String) -> Response {
        Response::new(200, "application/json", text)
    }
}

impl Daemon {
    /// Listens for clients of HTTP, as `--metrics` does; [`Daemon::start_http`] serves them.
    ///
    /// # Errors
    /// If others could reach it who need not prove anything, or the system refuses it.
    pub async fn add_metrics(&self, options: Options) -> Result<(), Failure> {
        let environment = self.parts.lock().await.environment.clone();
        let bound = listen::bind(options, &environment)?;
        self.doors.borrow_mut().push(bound);
        Ok(())
    }

    /// Serves HTTP where that was asked for. What is returned ends some time after the daemon has.
    ///
    /// # Errors
    /// If there can be no thread for it.
    pub fn start_http(self: &Rc<Self>) -> Result<Option<JoinHandle<()>>, Failure> {
        let bound = self.doors.take();
        match bound.is_empty() {
            true => Ok(None),
            false => start(self, bound).map(Some),
        }
    }
}

#[cfg(feature = "http")]
fn start(daemon: &Rc<Daemon>, bound: Vec<Bound>) -> Result<JoinHandle<()>, Failure> {
    let (service, questions) = service::Service::new(daemon.nodes.clone());
    let stop = vellum_export::nbd::Stop::new();
    let gone = server::start(bound, service, stop.clone())?;
    let daemon = daemon.clone();
    Ok(vellum_io::spawn(async move {
        desk::attend(daemon, questions).await;
        stop.request();
        // The thread has ended if it cannot tell so.
        let _ = gone.await;
    }))
}

/// Nothing listens in such a build.
#[cfg(not(feature = "http"))]
fn start(_daemon: &Rc<Daemon>, _bound: Vec<Bound>) -> Result<JoinHandle<()>, Failure> {
    Err(super::message(
        "HTTP requires a build with the feature 'http'",
    ))
}

//! What a server tells about its clients.

use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vellum_export::accounting::FailedRequest;
use vellum_export::nbd::{Log, Phase};
use vellum_io::error::errno_text;

use crate::report;
use crate::terminal::harmless;

/// Reports the clients whose negotiation failed; if `verbose`, what other clients do wrong, too.
/// Clients decide how much that is, so none of them waits until it is read.
pub fn log(verbose: bool) -> Log {
    let print = |what: &str, line: &dyn Display| {
        vellum_graph::stderr::print_line(&format!("{}: {what}: {line}", report::program()));
    };
    Arc::new(move |phase, line| match phase {
        Phase::Negotiation => print("option negotiation failed", &line),
        Phase::Transmission if verbose => print("info", &line),
        Phase::Transmission => {}
    })
}

/// Between two failures that are told.
const FAILURES_EVERY: Duration = Duration::from_secs(1);

/// Tells why requests of clients fail, who get a number only: what the system has a text for they know. One
/// a second is told, as clients go on asking.
pub fn failures() -> impl Fn(&FailedRequest<'_>) + Send + Sync + 'static {
    let last = Mutex::new(None::<Instant>);
    move |failed| {
        if failed.reason.ends_with(&*errno_text(failed.errno)) {
            return;
        }
        let mut last = last.lock();
        if last.is_some_and(|last| last.elapsed() < FAILURES_EVERY) {
            return;
        }
        *last = Some(Instant::now());
        vellum_graph::stderr::print_line(&format!(
            "{}: warning: a request has failed: {}",
            report::program(),
            harmless(failed.reason)
        ));
    }
}

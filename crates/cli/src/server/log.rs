//! What a server tells about its clients.

use std::fmt::Display;
use std::sync::Arc;

use vellum_export::nbd::{Log, Phase};

use crate::report;

/// Reports the clients whose negotiation failed; if `verbose`, what other clients do wrong, too.
/// Clients decide how much that is, so none of them waits until it is read.
pub fn log(verbose: bool) -> Log {
    let print = |what: &str, line: &dyn Display| {
        vellum_control::stderr::print_line(&format!("{}: {what}: {line}", report::program()));
    };
    Arc::new(move |phase, line| match phase {
        Phase::Negotiation => print("option negotiation failed", &line),
        Phase::Transmission if verbose => print("info", &line),
        Phase::Transmission => {}
    })
}

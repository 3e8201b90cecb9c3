//! `vellum daemon --metrics`, and `vellum ctl`: as Prometheus, scripts and people use them, and as
//! those do who mean harm.

mod alerts;
mod client;
mod ctl;
mod dashboard;
mod grafana;
mod hostile;
mod metrics;
#[path = "../qmp/place.rs"]
#[allow(
    dead_code,
    reason = "of all that the monitor's tests need some is needed here"
)]
mod place;
mod rest;
mod tls;

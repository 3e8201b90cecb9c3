//! Names that a daemon knows, for completions.
//!
//! Invariant: what fails leads to no names, never to a message.

use std::time::Duration;

use serde_json::Value;

use super::address::Address;
use super::arguments::VARIABLE;
use super::client::Client;
use super::{ask, tables};

/// Somebody sits there.
const PATIENCE: Duration = Duration::from_secs(2);

/// What is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named {
    Disks,
    Jobs,
    Exports,
    /// QMP's commands.
    Commands,
}

/// The names that the daemon at an address knows, or that of `VELLUM_CTL`, each with what it is.
pub fn names(
    kind: Named,
    address: Option<&str>,
    token_file: Option<&str>,
) -> Vec<(String, String)> {
    let found = || {
        let text = address
            .map(str::to_owned)
            .or_else(|| std::env::var(VARIABLE).ok())?;
        let address = Address::parse(&text).ok()?;
        let client = Client::new(
            address,
            token_file.map(std::path::Path::new),
            Some(PATIENCE),
        )
        .ok()?;
        let (method, path) = match kind {
            Named::Disks => ("GET", "/v1/disks"),
            Named::Jobs => ("GET", "/v1/jobs"),
            Named::Exports => ("GET", "/v1/exports"),
            Named::Commands => ("POST", "/v1/qmp/query-commands"),
        };
        ask(&client, method, path, None).ok()
    };
    let all = found().unwrap_or(Value::Null);
    let (name, about) = match kind {
        Named::Disks => ("node-name", "driver"),
        Named::Jobs => ("id", "status"),
        Named::Exports => ("id", "node-name"),
        Named::Commands => ("name", ""),
    };
    let names = tables::items(&all).map(|one| (tables::text(one, name), tables::text(one, about)));
    let steers = |name: &str| name.is_empty() || name.chars().any(char::is_control);
    names.filter(|(name, _)| !steers(name)).collect()
}

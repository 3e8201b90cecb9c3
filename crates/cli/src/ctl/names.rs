//! Names that a daemon knows, for completions.
//!
//! Invariant: what fails leads to no names, never to a message.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use super::address::Address;
use super::arguments::VARIABLE;
use super::client::{Client, Peer};
use super::tables;

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

/// The names that a daemon knows, each with what it is. `option` tells what the command line says; what it does not say
/// of where the daemon is `VELLUM_CTL` does.
pub fn names<'a>(kind: Named, option: impl Fn(&str) -> Option<&'a str>) -> Vec<(String, String)> {
    let found = || {
        let text = option("connect")
            .map(str::to_owned)
            .or_else(|| std::env::var(VARIABLE).ok())?;
        let peer = Peer {
            address: Address::parse(&text).ok()?,
            token_file: option("token-file").map(PathBuf::from),
            tls: option("tls").map(PathBuf::from),
        };
        let client = Client::new(peer, Some(PATIENCE)).ok()?;
        let (method, path) = match kind {
            Named::Disks => ("GET", "/v1/disks"),
            Named::Jobs => ("GET", "/v1/jobs"),
            Named::Exports => ("GET", "/v1/exports"),
            Named::Commands => ("POST", "/v1/qmp/query-commands"),
        };
        client.ask_json(method, path, None).ok()
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

//! `--nbd-server`.

use std::time::Duration;

use vellum_control::{Options, tls};
use vellum_export::nbd::ServerOptions;

use super::{Server, failure, message, need, refuse_rest};
use crate::nbd::{Failure, serve};

/// QEMU's limit where none is given.
const DEFAULT_CONNECTIONS: u64 = 100;

/// Listens where the options say.
pub(super) fn listen(mut options: Options) -> Result<Server, Failure> {
    let authz = options.take_text("tls-authz").map_err(failure)?;
    let tls = match options.take_text("tls-creds").map_err(failure)? {
        Some(id) => Some(tls::server(&id, authz).map_err(failure)?),
        None => None,
    };
    let max_connections = options.take_number("max-connections").map_err(failure)?;
    let handshake = options
        .take_number("handshake-max-seconds")
        .map_err(failure)?;
    let mut address = options.take_group("addr");
    refuse_rest(&options)?;
    let listener = match need(&mut address, "type")?.as_str() {
        "unix" => {
            let path = address.take_text("path").map_err(failure)?;
            let path = path.ok_or_else(|| message("Parameter 'addr.path' is missing"))?;
            refuse_rest(&address)?;
            serve::listen_unix(&path)?
        }
        "inet" => {
            let mut part = |key: &str| {
                let value = address.take_text(key).map_err(failure)?;
                value.ok_or_else(|| message(format!("Parameter 'addr.{key}' is missing")))
            };
            let (host, port) = (part("host")?, part("port")?);
            refuse_rest(&address)?;
            serve::listen_tcp(&host, &port)?
        }
        kind @ ("vsock" | "fd") => {
            return Err(message(format!(
                "Addresses of type '{kind}' are not part of this version"
            )));
        }
        other => {
            return Err(message(format!(
                "Parameter 'type' does not accept value '{other}'"
            )));
        }
    };
    let defaults = ServerOptions::default();
    let max_connections = max_connections.unwrap_or(DEFAULT_CONNECTIONS);
    Ok(Server {
        listener,
        options: ServerOptions {
            max_connections: usize::try_from(max_connections).unwrap_or(usize::MAX),
            persistent: true,
            tls,
            log: Some(serve::log(false)),
            handshake_limit: match handshake {
                None => defaults.handshake_limit,
                Some(0) => None,
                Some(seconds) => Some(Duration::from_secs(seconds)),
            },
            ..defaults
        },
    })
}

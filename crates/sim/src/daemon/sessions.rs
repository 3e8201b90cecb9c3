//! Clients that speak to the exports through NBD sessions: our own client on one side of a
//! simulated network, the daemon's server on the other.

use std::sync::Arc;

use serde_json::json;
use vellum::{BlockDevice, Raw, RawOptions};
use vellum_nbd::client::{Address, ClientOptions, NbdStorage};

use super::network::Network;
use super::setup::Setup;
use crate::failure::{Failure, FailureKind};

/// Where the daemon's server listens.
pub(super) const PORT: &str = "nbd";

/// Has the daemon serve clients; whether it does.
pub(super) async fn serve(setup: &Setup) -> bool {
    let address = json!({"type": "unix", "data": {"path": PORT}});
    let arguments = json!({"addr": address, "max-connections": 0});
    setup.demand("nbd-server-start", arguments).await
}

/// What a client of an export has of it.
pub(super) async fn connect(
    setup: &Setup,
    network: &Arc<Network>,
    export: &str,
    writable: bool,
) -> Option<Arc<dyn BlockDevice>> {
    let mut options = ClientOptions::new(export, Address::Unix(PORT.to_owned()));
    options.export = export.to_owned();
    options.writable = writable;
    options.dial = Some(network.clone());
    options.max_connections = setup.draw(|rng| rng.between(1, 4)) as usize;
    let shape = RawOptions::default().read_only(!writable);
    let opened = NbdStorage::open(options)
        .await
        .and_then(|storage| Raw::open(storage, shape));
    match opened {
        Ok(device) => Some(device),
        Err(error) => {
            setup.fail(Failure::error(FailureKind::Request, "connect", &error));
            None
        }
    }
}

//! Passphrases of an encrypted image: what unlocks it must do so after every cut.

use std::sync::Arc;

use vellum::luks::{IterationTime, KeyChange};
use vellum::qcow2::AsQcow2;
use vellum::{BlockDevice, Error};

use crate::failure::{Failure, FailureKind};

/// A passphrase that comes and goes.
const OTHER: &str = "another";

/// Adds a passphrase and takes it away again, beside the requests that run.
pub(super) async fn change(device: Arc<dyn BlockDevice>) -> Result<(), Failure> {
    let Some(image) = device.as_qcow2() else {
        return Ok(());
    };
    let failed = |error: Error| Failure::error(FailureKind::Request, "change keys", &error);
    let add = KeyChange::Add {
        known: None,
        slot: None,
        new: OTHER.into(),
        iteration_time: IterationTime::Iterations(1),
        force: false,
    };
    image.change_keys(add).await.map_err(failed)?;
    // What a cut has left behind goes too.
    let erase = KeyChange::Erase {
        slot: None,
        old: Some(OTHER.into()),
        force: false,
    };
    image.change_keys(erase).await.map_err(failed)?;
    Ok(())
}

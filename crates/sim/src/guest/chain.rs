//! Jobs on the image and its backing file: what the guest sees must not change, whatever
//! the moment at which the power fails.

use std::sync::Arc;

use vellum::qcow2::AsQcow2;
use vellum::{BlockDevice, Error};
use vellum_jobs::commit::{CommitOptions, commit as commit_job};
use vellum_jobs::copy::Silent;
use vellum_jobs::rebase::{RebaseOptions, rebase};

use super::Guest;
use crate::failure::{Failure, FailureKind};

fn failed(what: &'static str) -> impl Fn(Error) -> Failure {
    move |error| Failure::error(FailureKind::Request, what, &error)
}

/// Commits the closed image into its backing file, if it has one.
pub(super) async fn commit(guest: &Guest) -> Result<(), Failure> {
    let (engine, plugged, options) = (&*guest.engine, &guest.plugged, &guest.options);
    if !plugged.has_backing(options) {
        return Ok(());
    }
    let failed = failed("commit");
    let base = plugged.open_backing(engine, options, false).await;
    let Some(base) = base.map_err(&failed)? else {
        return Ok(());
    };
    let top = plugged.open_over(engine, options, base.clone()).await;
    let top = top.map_err(&failed)?;
    let committed = commit_job(&top, &base, &CommitOptions::default(), &mut Silent).await;
    committed.map_err(|error| failed(error.cause().clone()))?;
    top.close().await.map_err(&failed)?;
    base.close().await.map_err(&failed)
}

/// Makes the closed image independent of its backing file, if its header names one.
pub(super) async fn flatten(guest: &Guest, compress: bool) -> Result<(), Failure> {
    let (engine, plugged, options) = (&*guest.engine, &guest.plugged, &guest.options);
    if !plugged.has_backing(options) || !options.names_backing() {
        return Ok(());
    }
    let failed = failed("flatten");
    let image: Arc<dyn BlockDevice> = plugged.open(engine, options).await?;
    let unit_bytes = match options.extended_l2 && !compress {
        true => 1 << (options.cluster_bits - 5),
        false => 1 << options.cluster_bits,
    };
    let rebasing = RebaseOptions {
        parallel: 4,
        unit_bytes,
        compress,
    };
    let old = image.backing();
    let rebased = rebase(&image, old.as_ref(), None, &rebasing, &mut Silent).await;
    rebased.map_err(|error| failed(error.cause))?;
    if let Some(qcow2) = image.as_qcow2() {
        qcow2.set_backing_file(None).await.map_err(&failed)?;
    }
    image.close().await.map_err(&failed)
}

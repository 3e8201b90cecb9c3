//! What must hold after a power cut.
//!
//! In this order: the simulator's audit and the engine's check find leaks at worst;
//! the image opens; every sector reads as the model allows; after closing it again,
//! audit and check still find leaks at worst.
//!
//! After a clean close nothing has leaked that had not before; see `leaks`.

use std::rc::Rc;
use std::sync::Arc;

use crate::audit::{Frozen, audit};
use crate::disk::Mode;
use crate::failure::{Failure, FailureKind, guarded};
pub use crate::guest::Depth;
use crate::guest::{Guest, close, examine};
use crate::image_engine::ImageEngine;
use crate::layout::Layout;
use crate::machine::{Machine, MachineStorages};
use crate::runtime::Runtime;
use crate::scenario::ImageOptions;
use crate::sparse_bytes::SparseBytes;

/// Starts a machine after a power cut and checks everything; gives the machine with
/// a model that knows what was read. The model that comes is that of
/// [`after_cut`](crate::model::Model::after_cut).
pub fn verify(
    engine: &Arc<dyn ImageEngine>,
    options: &ImageOptions,
    mut machine: Machine,
    depth: Depth,
) -> Result<Machine, Failure> {
    guarded(|| {
        let plugged = machine.plug(options, Mode::Instant);
        let mut runtime = Runtime::new(plugged.disk.clone(), 0);
        // The refcounts of a dirty image are repaired when it is opened.
        let dirty = Layout::parse(&machine.files[0]).is_ok_and(|layout| layout.dirty);
        if !dirty {
            inspect(
                engine,
                &machine.files[0],
                &machine.frozen,
                &plugged,
                &mut runtime,
            )
            .map_err(|failure| failure.when("after the cut"))?;
        }
        inspect_backing(engine, options, &plugged, &mut runtime)?;
        let guest = Guest::new(
            engine,
            options,
            &plugged,
            std::mem::take(&mut machine.model),
        );
        let recovery = recover(guest.clone(), depth, dirty);
        runtime
            .block_on(recovery)?
            .map_err(|failure| failure.when("after the cut"))?;
        machine.model = guest.model.take();
        machine.model.make_durable();
        if dirty || depth == Depth::Thorough {
            runtime.finish_all();
            let image = plugged.contents().swap_remove(0);
            inspect(engine, &image, &machine.frozen, &plugged, &mut runtime)
                .map_err(|failure| failure.when("after the cut and a close"))?;
        }
        Ok(machine)
    })
}

/// What an image, and its backing file, have leaked.
pub(crate) fn leaks(
    engine: &Arc<dyn ImageEngine>,
    options: &ImageOptions,
    machine: &Machine,
) -> Result<u64, Failure> {
    let plugged = machine.plug(options, Mode::Instant);
    let mut runtime = Runtime::new(plugged.disk.clone(), 0);
    let mut leaks = 0;
    let images = [Some(plugged.files()), plugged.backing_image(options)];
    for files in images.into_iter().flatten() {
        let found = runtime
            .block_on(engine.check(files))?
            .map_err(|error| Failure::error(FailureKind::Check, "check", &error))?;
        if found.corruptions + found.check_errors > 0 {
            return Err(Failure::new(FailureKind::Check, format!("{found:?}")));
        }
        leaks += found.leaks;
    }
    Ok(leaks)
}

/// Audits and checks a plugged image that holds `image` now.
pub(crate) fn inspect(
    engine: &Arc<dyn ImageEngine>,
    image: &SparseBytes,
    frozen: &Frozen,
    plugged: &MachineStorages,
    runtime: &mut Runtime,
) -> Result<(), Failure> {
    let problems = match engine.is_qcow2() {
        true => audit(image, frozen),
        false => Vec::new(),
    };
    if !problems.is_empty() {
        return Err(Failure::new(FailureKind::Audit, problems.join("; ")));
    }
    let check = engine.check(plugged.files());
    let findings = runtime
        .block_on(check)?
        .map_err(|error| Failure::error(FailureKind::Check, "check", &error))?;
    if findings.corruptions + findings.check_errors > 0 {
        return Err(Failure::new(FailureKind::Check, format!("{findings:?}")));
    }
    Ok(())
}

/// Audits and checks the backing file, which a commit may have written to.
fn inspect_backing(
    engine: &Arc<dyn ImageEngine>,
    options: &ImageOptions,
    plugged: &MachineStorages,
    runtime: &mut Runtime,
) -> Result<(), Failure> {
    let Some(files) = plugged.backing_image(options) else {
        return Ok(());
    };
    let pages = plugged.backing_contents();
    let problems = audit(&pages, &Frozen::default());
    if !problems.is_empty() {
        let message = format!("backing file: {}", problems.join("; "));
        return Err(Failure::new(FailureKind::Audit, message));
    }
    let findings = runtime
        .block_on(engine.check(files))?
        .map_err(|error| Failure::error(FailureKind::Check, "check the backing file", &error))?;
    match findings.corruptions + findings.check_errors {
        0 => Ok(()),
        _ => Err(Failure::new(
            FailureKind::Check,
            format!("backing file: {findings:?}"),
        )),
    }
}

async fn recover(guest: Rc<Guest>, depth: Depth, dirty: bool) -> Result<(), Failure> {
    let device = guest.plugged.open(&*guest.engine, &guest.options).await?;
    examine(&guest, &*device, depth).await?;
    if dirty || depth == Depth::Thorough {
        close(&guest, &*device).await?;
    }
    Ok(())
}

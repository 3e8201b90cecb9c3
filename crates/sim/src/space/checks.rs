//! What is checked of space after a cycle.
//!
//! 1. After a clean close of an image in a file that grows as it wants, the highest host cluster in use
//!    lies below 1.1 times the peak of what was needed, plus 1 MiB.
//! 2. If the process is killed behind a flush, with nothing in flight, at most
//!    [`MAX_KILL_LEAKS`] clusters leak.
//! 3. Opened for writing and closed after that, the image has no more leaks than before, if its header
//!    can tell of them (version 3).

use std::sync::Arc;

use super::Place;
use crate::audit::usage;
use crate::disk::Mode;
use crate::failure::{Failure, FailureKind};
use crate::image_engine::ImageEngine;
use crate::layout::Layout;
use crate::machine::Machine;
use crate::runtime::Runtime;
use crate::scenario::ImageOptions;
use crate::sparse_bytes::SparseBytes;

/// Clusters that a killed process may leak behind a flush.
pub(crate) const MAX_KILL_LEAKS: u64 = 16;

/// Beyond its share the file may have so many bytes more in use.
const COMPACT_SLACK_BYTES: u64 = 1 << 20;

/// What a cycle has left to be checked.
#[derive(Debug, Default)]
pub(crate) struct CycleEnd {
    /// What the files held after each clean close, the backing file last.
    pub(crate) closed: Vec<Vec<SparseBytes>>,
    /// What the image's own files held as a flush ended with nothing in flight.
    pub(crate) flushed: Vec<Vec<SparseBytes>>,
    /// The most bytes that the image needed at any time, if that is known.
    pub(crate) peak_bytes: Option<u64>,
}

/// Checks what a cycle has left; `machine`: what it began with.
pub(crate) fn check(
    engine: &Arc<dyn ImageEngine>,
    options: &ImageOptions,
    machine: &Machine,
    end: &CycleEnd,
) -> Result<(), Failure> {
    if options.place == Place::Unchecked || !engine.is_qcow2() {
        return Ok(());
    }
    if let Some(files) = end.closed.last() {
        check_compactness(options, machine, &files[0], end.peak_bytes)?;
    }
    let before = usage_of(&machine.files[0])?.leaked;
    for (number, files) in end.flushed.iter().enumerate() {
        check_kill(engine, options, machine, files, before)
            .map_err(|failure| failure.when(&format!("killed behind quiet flush {number}")))?;
    }
    Ok(())
}

fn usage_of(image: &SparseBytes) -> Result<crate::audit::Usage, Failure> {
    usage(image).map_err(|message| Failure::new(FailureKind::Audit, message))
}

fn check_compactness(
    options: &ImageOptions,
    machine: &Machine,
    image: &SparseBytes,
    peak_bytes: Option<u64>,
) -> Result<(), Failure> {
    let (Place::Growable, Some(peak_bytes)) = (options.place, peak_bytes) else {
        return Ok(());
    };
    if Layout::parse(&machine.files[0]).is_ok_and(|layout| layout.dirty) {
        // What a cut has left is not counted yet.
        return Ok(());
    }
    let bound = peak_bytes + peak_bytes / 10 + COMPACT_SLACK_BYTES;
    // A cut may have left more.
    let bound = bound.max(usage_of(&machine.files[0])?.end_bytes);
    let end_bytes = usage_of(image)?.end_bytes;
    if end_bytes <= bound {
        return Ok(());
    }
    let message = format!(
        "clusters are in use up to {end_bytes} bytes, but at most {peak_bytes} were needed at once"
    );
    Err(Failure::new(FailureKind::Sprawl, message))
}

/// Checks what is left of a process that was killed, with what is in flight lost.
fn check_kill(
    engine: &Arc<dyn ImageEngine>,
    options: &ImageOptions,
    machine: &Machine,
    files: &[SparseBytes],
    before: u64,
) -> Result<(), Failure> {
    if Layout::parse(&files[0]).is_ok_and(|layout| layout.dirty) {
        // Lazy refcounts are counted anew when the image is opened.
        return Ok(());
    }
    let leaked = usage_of(&files[0])?.leaked;
    if leaked > before + MAX_KILL_LEAKS {
        let message = format!("{leaked} clusters are leaked, {before} were before");
        return Err(Failure::new(FailureKind::Leak, message));
    }
    let killed = Machine {
        files: files.to_vec(),
        ..machine.clone()
    };
    let left = leaked_after_reopening(engine, options, &killed)?;
    let most = match options.version >= 3 {
        true => before,
        false => before + MAX_KILL_LEAKS,
    };
    if left > most {
        let message =
            format!("{left} clusters are leaked once it was opened and closed, of {leaked}");
        return Err(Failure::new(FailureKind::Leak, message));
    }
    Ok(())
}

fn leaked_after_reopening(
    engine: &Arc<dyn ImageEngine>,
    options: &ImageOptions,
    machine: &Machine,
) -> Result<u64, Failure> {
    let plugged = machine.plug(options, Mode::Instant);
    let mut runtime = Runtime::new(plugged.disk.clone(), 0);
    let (engine, options, inside) = (engine.clone(), options.clone(), plugged.clone());
    runtime.block_on(async move {
        let device = inside.open(&*engine, &options).await?;
        let closed = device.close().await;
        closed.map_err(|error| Failure::error(FailureKind::Request, "close", &error))
    })??;
    runtime.finish_all();
    Ok(usage_of(&plugged.disk.contents(0))?.leaked)
}

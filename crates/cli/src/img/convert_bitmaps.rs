//! `convert --bitmaps`: the source's bitmaps go along with its data.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum::qcow2::info::BitmapInfo;
use vellum::qcow2::{AsQcow2, BitmapOptions, NewBitmap, Qcow2};
use vellum_options::error_text;

use super::command::{Failure, fail};
use super::convert_args::Arguments;
use crate::report;

/// Refuses sources whose bitmaps cannot be copied, before anything is made.
pub(super) async fn check_sources(
    arguments: &Arguments,
    sources: &[Arc<dyn BlockDevice>],
) -> Result<(), Failure> {
    if !arguments.bitmaps {
        return Ok(());
    }
    let [source] = sources else {
        return fail("Copying bitmaps only possible with single source");
    };
    if !supports_bitmaps(source) {
        return fail("Source lacks bitmap support");
    }
    // QEMU goes through them from the last to the first.
    for bitmap in list(source).await?.iter().rev() {
        if !bitmap.consistent && !arguments.skip_broken_bitmaps {
            return fail(format!(
                "Cannot copy inconsistent bitmap '{}'\n\
                 Try --skip-broken-bitmaps, or use 'qemu-img bitmap --remove' to delete it",
                bitmap.name
            ));
        }
    }
    Ok(())
}

/// Refuses a target that cannot have bitmaps.
pub(super) fn check_target(
    arguments: &Arguments,
    format: &str,
    target: &Arc<dyn BlockDevice>,
) -> Result<(), Failure> {
    match arguments.bitmaps && !supports_bitmaps(target) {
        true => fail(format!("Format driver '{format}' does not support bitmaps")),
        false => Ok(()),
    }
}

/// Copies all bitmaps that can be; those that record writes do so in the target too.
pub(super) async fn copy(
    arguments: &Arguments,
    sources: &[Arc<dyn BlockDevice>],
    target: &Arc<dyn BlockDevice>,
) -> Result<(), Failure> {
    let ([source], true) = (sources, arguments.bitmaps) else {
        return Ok(());
    };
    let (Some(from), Some(to)) = (source.as_qcow2(), target.as_qcow2()) else {
        return fail("Source lacks bitmap support");
    };
    let bitmaps = list(source).await?;
    for lost in bitmaps.iter().rev().filter(|bitmap| !bitmap.consistent) {
        let name = &lost.name;
        report::warning(format_args!("Skipping inconsistent bitmap '{name}'"));
    }
    let bitmaps: Vec<_> = bitmaps.iter().filter(|bitmap| bitmap.consistent).collect();
    if copy_all(from, to, &bitmaps).await.is_ok() {
        return Ok(());
    }
    // The message says which one cannot be copied, and those before it are.
    for bitmap in bitmaps {
        copy_one(from, to, bitmap).await?;
    }
    Ok(())
}

/// Copies all bitmaps with one change of the target, or none: so they take no more clusters than
/// `measure` counts.
async fn copy_all(from: &Qcow2, to: &Qcow2, bitmaps: &[&BitmapInfo]) -> vellum::Result<()> {
    let mut new = Vec::with_capacity(bitmaps.len());
    for bitmap in bitmaps {
        let content = from.bitmaps().read(&bitmap.name).await?;
        new.push(NewBitmap::new(&bitmap.name, options_of(bitmap)).content(content));
    }
    to.bitmaps().add_all(new).await
}

fn options_of(bitmap: &BitmapInfo) -> BitmapOptions {
    BitmapOptions::default()
        .granularity_bytes(Some(bitmap.granularity_bytes))
        .disabled(!bitmap.auto)
}

async fn copy_one(from: &Qcow2, to: &Qcow2, bitmap: &BitmapInfo) -> Result<(), Failure> {
    let name = &bitmap.name;
    let failed = |what: &str, error: vellum::Error| {
        let text = error_text(&error);
        Failure::Message(format!("Failed to {what} bitmap {name}: {text}"))
    };
    let added = to.bitmaps().add(name, options_of(bitmap)).await;
    added.map_err(|error| failed("create", error))?;
    let populated = match from.bitmaps().read(name).await {
        Ok(content) => to.bitmaps().merge(name, vec![content]).await,
        Err(error) => Err(error),
    };
    if let Err(error) = populated {
        // The first error is the one to tell.
        drop(to.bitmaps().remove(name).await);
        return Err(failed("populate", error));
    }
    Ok(())
}

fn supports_bitmaps(device: &Arc<dyn BlockDevice>) -> bool {
    let image = device.as_qcow2();
    image.is_some_and(|image| image.header().version >= 3)
}

async fn list(device: &Arc<dyn BlockDevice>) -> Result<Vec<BitmapInfo>, Failure> {
    match device.as_qcow2() {
        Some(image) => Ok(image.bitmaps().list().await?),
        None => Ok(Vec::new()),
    }
}

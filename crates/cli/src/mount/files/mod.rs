//! `vellum mount --files`: the files of one partition of a disk, as a directory.
//!
//! `choose` finds the partition that is meant, `disk` has its bytes read on the image's lane.
//!
//! Readers of file systems block, so none of this runs on a lane: that has the image alone.

mod choose;
mod disk;

use std::path::Path;
use std::sync::Arc;

use futures_util::future::select;
use vellum::BlockDevice;
use vellum::blocking::Device;
use vellum_export::fuse::AllowOther;
use vellum_export::fuse::tree::{TreeExport, TreeOptions};
use vellum_export::nbd::Stop;
use vellum_files::Source;
use vellum_io::lane::{LaneOptions, LaneThread};
use vellum_io::{program, spawn};

use super::arguments::Arguments;
use crate::server::{Failure, Process, Ready, catch_signals, close, daemonize, stop_on_signal};
use crate::{hint, report};
use disk::Disk;

/// Shows the files until they are unmounted or a signal comes.
pub(super) fn start(arguments: &Arc<Arguments>) -> Result<(), Failure> {
    let Process::Server(ready) = daemonize(arguments.fork)? else {
        return Ok(());
    };
    let stop = Stop::new();
    let signals = catch_signals()?;
    let lane = Arc::new(LaneThread::start("vellum-image", LaneOptions::default())?);
    // A task on it waits for signals for ever: it ends with the program, and nobody waits for it.
    std::mem::forget(lane.clone());
    let (opened, stopped) = (arguments.clone(), stop.clone());
    let device = lane.call(|| async move {
        drop(spawn(stop_on_signal(signals, stopped.clone())));
        Ok(stopped.or_give_up(super::open(&opened)).await)
    })?;
    // Signals do not end the program by themselves any more.
    let Some(device) = device else {
        return Ok(());
    };
    let device = device?;
    let served = serve(arguments, device.clone(), &lane, ready, stop);
    let name = arguments.image.clone();
    lane.call(|| async move { Ok(close(&*device, &name, served).await) })?
}

fn serve(
    arguments: &Arguments,
    device: Arc<dyn BlockDevice>,
    lane: &Arc<LaneThread>,
    ready: Option<Ready>,
    stop: Stop,
) -> Result<(), Failure> {
    let failed = |error: vellum_io::Error| Failure::message(report::error_text(&error));
    let mountpoint = super::absolute(&arguments.mountpoint)?;
    let source = Source::new(Arc::new(Disk::new(Device::new(device, lane.clone()))));
    let chosen = choose::choose(&source, &arguments.image, arguments.partition)?;
    let volume = chosen.source;
    let files = vellum_files::open(volume, chosen.contents).map_err(|error| {
        let (image, what) = (&arguments.image, chosen.contents.name());
        let (place, way) = (&chosen.place, choose::OTHER_WAYS);
        Failure::message(format!(
            "{place} of '{image}' holds {what} ({error}); {way}"
        ))
    })?;
    for remark in files.remarks() {
        report::warning(format_args!(
            "{} of '{}': {remark}",
            chosen.place, arguments.image
        ));
    }
    if let Some(reason) = chosen.reason {
        let what = format_args!("{} ({})", chosen.place, chosen.contents.name());
        report::info(format_args!("showing {what}, {}", reason.text()));
    }
    let options = TreeOptions::default()
        .source(arguments.image.clone())
        .allow_other(match arguments.allow_other {
            true => AllowOther::On,
            false => AllowOther::Off,
        });
    let export = Arc::new(TreeExport::new(files, mountpoint, &options).map_err(failed)?);
    let begun = super::tell(arguments, ready, || {
        let directory = Path::new(&arguments.mountpoint).display();
        hint::give(&format!(
            "the files in '{}' are below '{directory}': Ctrl-C or 'umount {directory}' ends it",
            arguments.image,
        ));
    });
    let is_begun = begun.is_ok();
    let ended = lane.call(move || async move {
        if is_begun {
            program::discard_startup_pages();
            let unmounted = export.unmounted();
            let (stopped, unmounted) = (stop.wait(), unmounted.wait());
            select(std::pin::pin!(stopped), std::pin::pin!(unmounted)).await;
        }
        export.end().await;
        Ok(())
    });
    begun?;
    ended.map_err(failed)
}

//! `vellum mount`: the command.

use std::ffi::OsString;
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::select;
use vellum::BlockDevice;
use vellum_export::fuse::{AllowOther, Export, ExportOptions, remove_dead_mounts};
use vellum_export::nbd::Stop;
use vellum_io::program;

use crate::report;
use crate::server::{Failure, Ready, absolute, announce, close, start};

use super::arguments::{Arguments, SPEC};

/// Runs the tool and returns its exit code.
pub fn main(_program: &str, args: Vec<OsString>) -> i32 {
    let done = Arguments::parse(args).and_then(|arguments| {
        start(arguments.image.fork, async |ready, stop| {
            run(&arguments, ready, stop).await
        })
    });
    Failure::exit_code(done, &SPEC)
}

async fn run(arguments: &Arguments, ready: Option<Ready>, stop: &Stop) -> Result<(), Failure> {
    remove_dead_mounts(&absolute(&arguments.mountpoint)?);
    // Signals do not end the program by themselves any more.
    let Some(device) = stop.or_give_up(arguments.image.open()).await else {
        return Ok(());
    };
    let device = device?;
    let served = serve(arguments, device.clone(), ready, stop).await;
    close(&*device, &arguments.image.name, served).await
}

async fn serve(
    arguments: &Arguments,
    device: Arc<dyn BlockDevice>,
    ready: Option<Ready>,
    stop: &Stop,
) -> Result<(), Failure> {
    let failed = |error: vellum_io::Error| Failure::message(report::error_text(&error));
    let mountpoint = absolute(&arguments.mountpoint)?;
    let options = ExportOptions::default()
        .writable(!arguments.image.read_only && !device.info().read_only)
        .growable(arguments.growable)
        .allow_other(match arguments.allow_other {
            true => AllowOther::On,
            false => AllowOther::Off,
        })
        .transport(arguments.transport);
    let export = Export::new(device, mountpoint, &options).await;
    let export = export.map_err(failed)?;
    let begun = announce(arguments.image.pid_file.as_deref(), ready, || {
        format!(
            "the disk in '{}' is the file '{file}': Ctrl-C or 'umount {file}' ends it",
            arguments.image.name,
            file = arguments.mountpoint,
        )
    });
    if begun.is_ok() {
        program::discard_startup_pages();
        let unmounted = export.unmounted();
        select(pin!(stop.wait()), pin!(unmounted.wait())).await;
    }
    export.end().await;
    begun
}

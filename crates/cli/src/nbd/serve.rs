//! Serves the image: goes to the background if asked, opens the image, listens, serves until the
//! clients or a signal end it, and closes the image.
//!
//! Invariants:
//! - The pid file is written, and the parent is let go, only when clients can connect.
//! - The image is closed after the last client has left, also after an error.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum_daemon::{InetAddress, shown_bitmaps};
use vellum_export::Slice;
use vellum_export::nbd::{Export, Exports, Listener, ServerOptions, Stop};
use vellum_graph::open_device;
use vellum_images::overlay;
use vellum_io::program;
use vellum_options::{ImageSpec, OpenFlags};

use super::arguments::{Arguments, DEFAULT_ADDRESS, DEFAULT_PORT};
use crate::img::snapshot;
use crate::server::{
    Failure, Ready, activated_sockets, close, failures, listen_tcp, listen_unix, log, start,
    take_sockets, write_pid_file,
};
use crate::{hint, report};

/// Serves the image until the clients or a signal end it.
pub(super) fn serve(arguments: Arguments) -> Result<(), Failure> {
    let activated = match activated_sockets() {
        0 => None,
        count => {
            check_activation(&arguments)?;
            // Before anything else is opened: a descriptor that was promised and
            // is not there must not turn out to be one of ours.
            Some(take_sockets(count).map_err(Failure::Message)?)
        }
    };
    start(arguments.fork, async |ready, stop| {
        run(&arguments, activated, ready, stop).await
    })
}

fn check_activation(arguments: &Arguments) -> Result<(), Failure> {
    let conflicts = [
        (arguments.socket.is_some(), "Unix socket"),
        (arguments.bind.is_some(), "The interface"),
        (arguments.port.is_some(), "TCP port number"),
    ];
    match conflicts.iter().find(|(set, _)| *set) {
        Some((_, what)) => Err(Failure::message(format!(
            "{what} can't be set when using socket activation"
        ))),
        None => Ok(()),
    }
}

async fn run(
    arguments: &Arguments,
    activated: Option<Vec<OwnedFd>>,
    ready: Option<Ready>,
    stop: &Stop,
) -> Result<(), Failure> {
    // Signals do not end the program by themselves any more.
    let Some(device) = stop.or_give_up(open(arguments)).await else {
        return Ok(());
    };
    let device = device?;
    let served: Result<(), Failure> = async {
        let export = make_export(arguments, device.clone()).await?;
        let is_activated = activated.is_some();
        let listeners = listen(arguments, activated)?;
        if let Some(path) = &arguments.pid_file {
            write_pid_file(path)?;
        }
        if let Some(ready) = ready {
            ready.notify_parent(arguments.verbose)?;
        }
        let options = server_options(arguments)?;
        if !is_activated && !arguments.fork {
            hint::give(&what_is_served(arguments));
        }
        program::discard_startup_pages();
        vellum_export::nbd::serve(listeners, Exports::new([export]), options, stop).await;
        Ok(())
    }
    .await;
    close(&*device, &arguments.image, served).await
}

async fn open(arguments: &Arguments) -> Result<Arc<dyn BlockDevice>, Failure> {
    let name = &arguments.image;
    let format = arguments.format.as_deref();
    let failed = |error: vellum_io::Error| {
        Failure::message(format!(
            "Failed to blk_new_open '{name}': {}",
            report::error_text(&error)
        ))
    };
    let spec = ImageSpec::from_argument(name, arguments.image_opts, format).map_err(failed)?;
    let flags = OpenFlags {
        writable: !arguments.read_only && arguments.snapshot.is_none() && !arguments.temporary,
        cache: arguments.cache.unwrap_or_default(),
        aio: arguments.aio,
        discard: arguments.discard.unwrap_or(false),
        detect_zeroes: arguments.detect_zeroes,
        ..OpenFlags::default()
    };
    let mut device = open_device(&spec, &flags).await.map_err(failed)?;
    if arguments.temporary && !arguments.read_only {
        device = overlay::put_on(device).await.map_err(failed)?;
    }
    match show(arguments, &device).await {
        Ok(device) => Ok(device),
        Err(failure) => {
            // The first error is the one to report.
            let _ = device.close().await;
            Err(failure)
        }
    }
}

/// What is to be served of an image: its disk, or that as it was at a snapshot.
async fn show(
    arguments: &Arguments,
    device: &Arc<dyn BlockDevice>,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    let Some(text) = &arguments.snapshot else {
        return Ok(device.clone());
    };
    let selector = snapshot::selector(text)
        .map_err(|_| Failure::message(format!("Failed in parsing snapshot param `{text}'")))?;
    if arguments.offset_bytes > 0 {
        // The offset is cut off first, and what is left has no snapshots.
        without_offset(arguments, device)?;
        return Err(Failure::message(
            "Failed to load snapshot: Block format 'raw' used by device '' does not support \
             temporarily loading internal snapshots",
        ));
    }
    snapshot::shown(device, selector)
        .await
        .map_err(|error| Failure::message(report::error_text(&error)))
}

/// The image without the bytes that are to be left out.
fn without_offset(
    arguments: &Arguments,
    device: &Arc<dyn BlockDevice>,
) -> Result<Arc<Slice>, Failure> {
    let slice = Slice::new(device.clone(), arguments.offset_bytes);
    slice.map_err(|error| Failure::message(report::error_text(&error)))
}

async fn make_export(
    arguments: &Arguments,
    device: Arc<dyn BlockDevice>,
) -> Result<Export, Failure> {
    let shown: Arc<dyn BlockDevice> = match arguments.offset_bytes {
        0 => device,
        _ => without_offset(arguments, &device)?,
    };
    let mut export = Export::new(arguments.export_name.clone().unwrap_or_default(), shown);
    export.description.clone_from(&arguments.description);
    export.read_only |= arguments.read_only;
    export.multi_conn = arguments.shared.unwrap_or(1) != 1;
    export.allocation_depth = arguments.allocation_depth;
    // QEMU offers those first that were named last.
    let names: Vec<String> = arguments.bitmaps.iter().rev().cloned().collect();
    export.accounting.on_failure(failures());
    export.bitmaps = shown_bitmaps::find(&export.device, &names, export.read_only).await?;
    Ok(export)
}

fn server_options(arguments: &Arguments) -> Result<ServerOptions, Failure> {
    let defaults = ServerOptions::default();
    Ok(ServerOptions {
        tls: arguments.server_tls()?,
        max_connections: arguments.shared.unwrap_or(1),
        persistent: arguments.persistent,
        handshake_limit: arguments
            .handshake_limit
            .unwrap_or(defaults.handshake_limit),
        log: Some(log(arguments.verbose)),
        ..defaults
    })
}

/// For a person who waits for something to happen: where clients find the image, when the
/// program ends, and who else can come in.
fn what_is_served(arguments: &Arguments) -> String {
    let export = arguments.export_name.as_deref().unwrap_or_default();
    let host = arguments.bind.as_deref().unwrap_or(DEFAULT_ADDRESS);
    let place = match &arguments.socket {
        Some(path) => format!("nbd+unix:///{export}?socket={path}"),
        None => {
            let port = arguments.port.as_deref().unwrap_or(DEFAULT_PORT);
            format!("nbd://{host}:{port}/{export}")
        }
    };
    let end = match arguments.persistent {
        true => "Ctrl-C ends it",
        false => "it ends with its last client (-t: it stays)",
    };
    let open = match arguments.socket.is_none() && host == DEFAULT_ADDRESS {
        true => {
            "; whoever reaches this machine can connect (-b 127.0.0.1 or -k SOCKET: nobody else)"
        }
        false => "",
    };
    format!("'{}' is served at {place}: {end}{open}", arguments.image)
}

fn listen(
    arguments: &Arguments,
    activated: Option<Vec<OwnedFd>>,
) -> Result<Vec<Listener>, Failure> {
    if let Some(sockets) = activated {
        let take = |socket| {
            Listener::from_fd(socket).map_err(|error| {
                let text = report::error_text(&error);
                Failure::message(format!("Failed to use socket activation: {text}"))
            })
        };
        return sockets.into_iter().map(take).collect();
    }
    let listener = match &arguments.socket {
        Some(path) => listen_unix(path)?,
        None => listen_tcp(&InetAddress::new(
            arguments.bind.as_deref().unwrap_or(DEFAULT_ADDRESS),
            arguments.port.as_deref().unwrap_or(DEFAULT_PORT),
        ))?,
    };
    Ok(vec![listener])
}

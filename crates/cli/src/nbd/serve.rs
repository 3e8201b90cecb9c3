//! Opening the image, listening, serving, and ending in order.

use std::fmt::Display;
use std::fs;
use std::io::{Read, Write};
use std::net::ToSocketAddrs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FlockOperation, fcntl_lock};
use vellum::BlockDevice;
use vellum_control::{ImageSpec, OpenFlags, open_device, overlay, shown_bitmaps};
use vellum_export::Slice;
use vellum_export::nbd::{Export, Exports, Listener, Log, Phase, ServerOptions, Stop};
use vellum_io::{lane, program, spawn};

use super::arguments::Arguments;
use super::daemon::{self, Ready, Side};
use super::{DEFAULT_ADDRESS, DEFAULT_PORT, Failure, os_text};
use crate::{hint, img::snapshot, report, socket};

/// Longest path in bytes that a unix socket can have, with its terminator.
const MAX_SOCKET_PATH_BYTES: usize = 108;

fn message(text: impl Into<String>) -> Failure {
    Failure::Message(text.into())
}

/// Serves the image until the clients or a signal end it.
pub(super) fn serve(arguments: Arguments) -> Result<(), Failure> {
    let activated = match daemon::activated_sockets() {
        0 => None,
        count => {
            check_activation(&arguments)?;
            // Before anything else is opened: a descriptor that was promised and
            // is not there must not turn out to be one of ours.
            Some(daemon::take_sockets(count).map_err(message)?)
        }
    };
    let mut ready = None;
    if arguments.fork {
        match daemon::fork().map_err(|e| message(format!("Failed to fork: {}", os_text(&e))))? {
            Side::Parent(parent) => {
                return if parent.wait() {
                    Ok(())
                } else {
                    Err(Failure::Told)
                };
            }
            Side::Child(child) => ready = Some(child),
        }
    }
    let stop = Stop::new();
    let signals = catch_signals()?;
    lane::block_on(async {
        drop(spawn(stop_on_signal(signals, stop.clone())));
        run(&arguments, activated, ready, &stop).await
    })
}

fn check_activation(arguments: &Arguments) -> Result<(), Failure> {
    let conflicts = [
        (arguments.socket.is_some(), "Unix socket"),
        (arguments.bind.is_some(), "The interface"),
        (arguments.port.is_some(), "TCP port number"),
    ];
    match conflicts.iter().find(|(set, _)| *set) {
        Some((_, what)) => Err(message(format!(
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
            ready
                .tell(arguments.verbose)
                .map_err(|e| message(format!("Failed to daemonize: {}", os_text(&e))))?;
        }
        let options = server_options(arguments)?;
        if !is_activated && !arguments.fork {
            hint::give(&what_is_served(arguments));
        }
        program::forget_start();
        vellum_export::nbd::serve(listeners, Exports::new([export]), options, stop).await;
        Ok(())
    }
    .await;
    // Also after an error: the image was opened, so it must be left clean.
    let closed = device.close().await;
    served?;
    closed.map_err(|error| {
        let text = report::error_text(&error);
        message(format!("Failed to close '{}': {text}", arguments.image))
    })
}

async fn open(arguments: &Arguments) -> Result<Arc<dyn BlockDevice>, Failure> {
    let name = &arguments.image;
    let format = arguments.format.as_deref();
    let failed = |error: vellum_io::Error| {
        message(format!(
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
        .map_err(|_| message(format!("Failed in parsing snapshot param `{text}'")))?;
    if arguments.offset_bytes > 0 {
        // The offset is cut off first, and what is left has no snapshots.
        without_offset(arguments, device)?;
        return Err(message(
            "Failed to load snapshot: Block format 'raw' used by device '' does not support \
             temporarily loading internal snapshots",
        ));
    }
    snapshot::shown(device, selector)
        .await
        .map_err(|error| message(report::error_text(&error)))
}

/// The image without the bytes that are to be left out.
fn without_offset(
    arguments: &Arguments,
    device: &Arc<dyn BlockDevice>,
) -> Result<Arc<Slice>, Failure> {
    let slice = Slice::new(device.clone(), arguments.offset_bytes);
    slice.map_err(|error| message(report::error_text(&error)))
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

/// Tells who could not come in; of the others, what they do wrong, where that is wanted.
/// Clients decide how much that is, so no client waits for who reads it.
pub(crate) fn log(verbose: bool) -> Log {
    let say = |what: &str, line: &dyn Display| {
        vellum_control::stderr::say(&format!("{}: {what}: {line}", report::program()));
    };
    Arc::new(move |phase, line| match phase {
        Phase::Negotiation => say("option negotiation failed", &line),
        Phase::Transmission if verbose => say("info", &line),
        Phase::Transmission => {}
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
                message(format!("Failed to use socket activation: {text}"))
            })
        };
        return sockets.into_iter().map(take).collect();
    }
    let listener = match &arguments.socket {
        Some(path) => listen_unix(path)?,
        None => listen_tcp(
            arguments.bind.as_deref().unwrap_or(DEFAULT_ADDRESS),
            arguments.port.as_deref().unwrap_or(DEFAULT_PORT),
        )?,
    };
    Ok(vec![listener])
}

/// Listens on a unix socket.
pub(crate) fn listen_unix(path: &str) -> Result<Listener, Failure> {
    if path.len() >= MAX_SOCKET_PATH_BYTES {
        return Err(message(format!(
            "UNIX socket path '{path}' is too long\nPath must be less than \
             {MAX_SOCKET_PATH_BYTES} bytes"
        )));
    }
    socket::check_free(path).map_err(message)?;
    Listener::bind_unix(Path::new(path)).map_err(|error| {
        let text = report::error_text(&error);
        message(format!("Failed to bind socket to {path}: {text}"))
    })
}

/// Listens on a TCP address.
pub(crate) fn listen_tcp(host: &str, port: &str) -> Result<Listener, Failure> {
    let number: u16 = port.parse().map_err(|_| super::bad_port(host, port))?;
    let addresses: Vec<_> = (host, number)
        .to_socket_addrs()
        .map_err(|error| {
            let text = error.to_string();
            let text = text.rsplit(": ").next().unwrap_or_default();
            message(format!(
                "address resolution failed for {host}:{port}: {text}"
            ))
        })?
        .collect();
    Listener::bind_tcp(&addresses[..]).map_err(|error| {
        message(format!(
            "Failed to bind socket: {}",
            report::error_text(&error)
        ))
    })
}

/// Writes the number of this process into a file, which stays locked until the process
/// ends: as QEMU does, so that of two servers with one such file the second refuses.
pub(crate) fn write_pid_file(path: &str) -> Result<(), Failure> {
    let failed =
        |what: &str, error: std::io::Error| message(format!("{what}: {}", os_text(&error)));
    let mut file = loop {
        let file = fs::File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(|error| failed(&format!("Could not create '{path}'"), error))?;
        let lock = fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive);
        lock.map_err(|errno| failed("Cannot lock pid file", errno.into()))?;
        let own = file.metadata();
        let own = own.map_err(|error| failed("Cannot stat file", error))?;
        // Who had the lock before may have removed the file.
        let named = fs::metadata(path);
        if named.is_ok_and(|named| (named.dev(), named.ino()) == (own.dev(), own.ino())) {
            break file;
        }
    };
    file.set_len(0)
        .map_err(|error| failed("Failed to truncate pid file", error))?;
    writeln!(file, "{}", std::process::id())
        .map_err(|error| failed("Failed to write pid file", error))?;
    // The lock is the process's, and given up when it closes the file.
    std::mem::forget(file);
    Ok(())
}

/// Arranges that the signals that end a program arrive as bytes on a socket.
pub(crate) fn catch_signals() -> Result<UnixStream, Failure> {
    let catch = || {
        let (reader, writer) = UnixStream::pair()?;
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
        }
        reader.set_nonblocking(true)?;
        Ok(reader)
    };
    catch().map_err(|error: std::io::Error| {
        message(format!("Failed to set up signals: {}", os_text(&error)))
    })
}

/// Requests the stop when a signal arrives.
pub(crate) async fn stop_on_signal(mut signals: UnixStream, stop: Stop) {
    // An error of the poll would mean that no signal can arrive any more.
    while signals.read(&mut [0]).is_err() {
        if lane::poll_readable(signals.as_fd()).await.is_err() {
            return;
        }
    }
    stop.request();
}

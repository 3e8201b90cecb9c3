//! The signals that end a server: they arrive as bytes on a socket, so that a lane can wait for
//! them.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use vellum_export::nbd::Stop;
use vellum_io::error::io_text;
use vellum_io::lane;

use super::Failure;

/// Arranges that the signals that end a program arrive as bytes on a socket.
pub fn catch_signals() -> Result<UnixStream, Failure> {
    catch_these(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP])
}

/// Arranges that some signals arrive as bytes on a socket.
pub fn catch_these(signals: &[i32]) -> Result<UnixStream, Failure> {
    let catch = || {
        let (reader, writer) = UnixStream::pair()?;
        for &signal in signals {
            signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
        }
        reader.set_nonblocking(true)?;
        Ok(reader)
    };
    catch().map_err(|error: std::io::Error| {
        Failure::message(format!("Failed to set up signals: {}", io_text(&error)))
    })
}

/// Requests the stop when a signal arrives.
pub async fn stop_on_signal(mut signals: UnixStream, stop: Stop) {
    if next_signal(&mut signals).await {
        stop.request();
    }
}

/// Waits for a signal; several that have come are one. `false` if none can arrive any more.
pub async fn next_signal(signals: &mut UnixStream) -> bool {
    while signals.read(&mut [0; 64]).is_err() {
        // An error of the poll would mean that no signal can arrive any more.
        if lane::poll_readable(signals.as_fd()).await.is_err() {
            return false;
        }
    }
    true
}

//! What systemd is told (`Type=notify-reload`): that everything is served, that the file is read
//! again, that the end has come, and from time to time that the daemon is alive.
//!
//! Invariant: nothing waits for it. Where nobody asked to be told (`NOTIFY_SOCKET`), nobody is.

use sd_notify::NotifyState;
use vellum_io::{lane, spawn};

fn notify(states: &[NotifyState<'_>]) {
    // There is nobody to tell of a failure.
    let _ = sd_notify::notify(states);
}

/// A status of one line.
fn line(text: &str) -> String {
    text.replace('\n', " ")
}

/// Everything is served as `status` says.
pub(super) fn ready(status: &str) {
    notify(&[NotifyState::Ready, NotifyState::Status(&line(status))]);
}

/// The configuration is read again; [`ready`] ends it.
pub(super) fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(_) => notify(&[NotifyState::Reloading]),
    }
}

/// The end has come.
pub(super) fn stopping() {
    notify(&[
        NotifyState::Stopping,
        NotifyState::Status("waiting for what clients have begun"),
    ]);
}

/// Says, twice in the time that the service manager gives, that the daemon's lane is alive. Must run
/// inside a lane.
pub(super) fn keep_watchdog() {
    let Some(limit) = sd_notify::watchdog_enabled() else {
        return;
    };
    drop(spawn(async move {
        loop {
            notify(&[NotifyState::Watchdog]);
            lane::sleep(limit / 2).await;
        }
    }));
}

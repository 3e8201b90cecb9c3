//! Commands for character devices.

use std::rc::Rc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use crate::chardev::{Wanted, backend_names};
use crate::daemon::Daemon;
use crate::qmp::{Arguments, Failure, Outcome};

use super::request::request;

/// How bytes are written in JSON.
#[derive(Debug, Clone, Copy)]
enum Format {
    Utf8,
    Base64,
}

const FORMATS: &[(&str, Format)] = &[("utf8", Format::Utf8), ("base64", Format::Base64)];

/// Takes a device that is wanted.
pub(super) fn take(mut arguments: Arguments) -> Result<Wanted, Failure> {
    let wanted = Wanted::take(&mut arguments)?;
    arguments.finish().map(|()| wanted)
}

pub(super) async fn add(daemon: Rc<Daemon>, wanted: Wanted) -> Outcome {
    let environment = daemon.parts.lock().await.environment.clone();
    daemon.chardevs.add_new(wanted, &environment).await
}

pub(super) async fn change(daemon: Rc<Daemon>, wanted: Wanted) -> Outcome {
    let environment = daemon.parts.lock().await.environment.clone();
    daemon.chardevs.take_for_change(&wanted)?;
    daemon.chardevs.add_new(wanted, &environment).await
}

pub(super) async fn remove(daemon: Rc<Daemon>, id: String) -> Result<(), Failure> {
    daemon.chardevs.remove(&id)
}

/// A break: no monitor takes notice of one.
pub(super) async fn send_break(daemon: Rc<Daemon>, id: String) -> Result<(), Failure> {
    daemon.chardevs.must_have(&id)
}

pub(super) async fn query(daemon: Rc<Daemon>, (): ()) -> Outcome {
    Ok(daemon.chardevs.query())
}

pub(super) async fn query_backends(_: Rc<Daemon>, (): ()) -> Outcome {
    let names = backend_names().iter();
    Ok(names.map(|name| json!({"name": name})).collect())
}

request! {
    /// `ringbuf-write`.
    pub(super) RingWrite {
        device: String = |a| a.need_text("device"),
        data: String = |a| a.need_text("data"),
        format: Option<Format> = |a| a.choice("format", FORMATS),
    }
}

pub(super) async fn ring_write(daemon: Rc<Daemon>, request: RingWrite) -> Result<(), Failure> {
    let RingWrite {
        device,
        data,
        format,
    } = request;
    // Whether there is such a device comes first.
    daemon.chardevs.with_ring(&device, |_| ())?;
    let bytes = match format {
        Some(Format::Base64) => BASE64_STANDARD
            .decode(&data)
            .map_err(|_| Failure::new("Base64 data contains invalid characters"))?,
        _ => data.into_bytes(),
    };
    daemon
        .chardevs
        .with_ring(&device, |ring| ring.write(&bytes))?;
    Ok(())
}

request! {
    /// `ringbuf-read`.
    pub(super) RingRead {
        device: String = |a| a.need_text("device"),
        size_bytes: i64 = |a| a.need_number("size"),
        format: Option<Format> = |a| a.choice("format", FORMATS),
    }
}

pub(super) async fn ring_read(daemon: Rc<Daemon>, request: RingRead) -> Outcome {
    let RingRead {
        device,
        size_bytes,
        format,
    } = request;
    daemon.chardevs.with_ring(&device, |_| ())?;
    let most_bytes = match usize::try_from(size_bytes) {
        Ok(bytes) if bytes > 0 => bytes,
        _ => return Err(Failure::new("size must be greater than zero")),
    };
    let bytes = daemon
        .chardevs
        .with_ring(&device, |ring| ring.read(most_bytes))?;
    Ok(Value::String(match format {
        Some(Format::Base64) => BASE64_STANDARD.encode(bytes),
        _ => String::from_utf8_lossy(&bytes).into_owned(),
    }))
}

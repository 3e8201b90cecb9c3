//! Commands for character devices.

use std::rc::Rc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use crate::chardev::{Wanted, backend_names};
use crate::daemon::Daemon;
use crate::qmp::{Arguments, Failure, Outcome};

use super::answers::done;

/// How bytes are written in JSON.
#[derive(Debug, Clone, Copy)]
enum Format {
    Utf8,
    Base64,
}

const FORMATS: &[(&str, Format)] = &[("utf8", Format::Utf8), ("base64", Format::Base64)];

pub(super) async fn add(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let wanted = Wanted::take(&mut arguments)?;
    arguments.finish()?;
    let environment = daemon.parts.lock().await.environment.clone();
    daemon.chardevs.add_new(wanted, &environment).await
}

pub(super) async fn change(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let wanted = Wanted::take(&mut arguments)?;
    arguments.finish()?;
    let environment = daemon.parts.lock().await.environment.clone();
    daemon.chardevs.take_for_change(&wanted)?;
    daemon.chardevs.add_new(wanted, &environment).await
}

pub(super) async fn remove(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let id = arguments.need_text("id")?;
    arguments.finish()?;
    daemon.chardevs.remove(&id)?;
    done()
}

/// A break: no monitor takes notice of one.
pub(super) async fn send_break(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let id = arguments.need_text("id")?;
    arguments.finish()?;
    daemon.chardevs.must_have(&id)?;
    done()
}

pub(super) async fn query(daemon: Rc<Daemon>, arguments: Arguments) -> Outcome {
    arguments.finish()?;
    Ok(daemon.chardevs.query())
}

pub(super) async fn query_backends(arguments: Arguments) -> Outcome {
    arguments.finish()?;
    let names = backend_names().iter();
    Ok(names.map(|name| json!({"name": name})).collect())
}

pub(super) async fn ring_write(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let device = arguments.need_text("device")?;
    let data = arguments.need_text("data")?;
    let format = arguments.choice("format", FORMATS)?;
    arguments.finish()?;
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
    done()
}

pub(super) async fn ring_read(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let device = arguments.need_text("device")?;
    let size_bytes = arguments.need_number("size")?;
    let format = arguments.choice("format", FORMATS)?;
    arguments.finish()?;
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

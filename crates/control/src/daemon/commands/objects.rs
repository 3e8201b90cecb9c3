//! Commands that make objects and drop them, and look at their properties.

use std::rc::Rc;

use serde_json::{Value, json};

use crate::qmp::{Arguments, Failure, Outcome};
use crate::{secret, throttle_groups};

use super::super::DaemonState;
use super::{Daemon, done, failed, no_device};

/// Where objects stand.
const FOLDER: &str = "/objects";

pub(super) async fn add(daemon: Rc<Daemon>, arguments: Arguments) -> Outcome {
    let mut parts = daemon.parts.lock().await;
    let options = arguments.into_options()?;
    parts.add_object(options).map_err(failed)?;
    done()
}

pub(super) async fn del(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let id = arguments.need_text("id")?;
    arguments.finish()?;
    let mut parts = daemon.parts.lock().await;
    let threads = parts.iothreads.len();
    parts.iothreads.retain(|other| *other != id);
    if parts.iothreads.len() < threads || secret::remove(&id) || throttle_groups::remove(&id)? {
        return done();
    }
    Err(Failure::new(format!("object '{id}' not found")))
}

/// The type of the object of a name, if there is one.
pub(in super::super) fn object_type(parts: &DaemonState, id: &str) -> Option<&'static str> {
    if parts.iothreads.iter().any(|other| other == id) {
        Some("iothread")
    } else if throttle_groups::contains(id) {
        Some(throttle_groups::TYPE)
    } else {
        secret::contains(id).then_some("secret")
    }
}

/// Takes `path` out: the name of an object, and its type.
async fn need_object(
    daemon: &Daemon,
    arguments: &mut Arguments,
) -> Result<(String, &'static str), Failure> {
    let path = arguments.need_text("path")?;
    let id = match path.strip_prefix(FOLDER) {
        Some(rest) => rest.strip_prefix('/').unwrap_or_default(),
        None => &path,
    };
    let kind = object_type(&*daemon.parts.lock().await, id);
    let kind = kind.ok_or_else(|| no_device(&path))?;
    Ok((id.to_owned(), kind))
}

pub(super) async fn get(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let (id, kind) = need_object(&daemon, &mut arguments).await?;
    let property = arguments.need_text("property")?;
    arguments.finish()?;
    match (kind, property.as_str()) {
        (kind, "type") => Ok(json!(kind)),
        (throttle_groups::TYPE, property) => Ok(throttle_groups::get(&id, property)?),
        _ => Err(no_property(kind, &property)),
    }
}

pub(super) async fn set(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let (id, kind) = need_object(&daemon, &mut arguments).await?;
    let property = arguments.need_text("property")?;
    let value = arguments.need_any("value")?;
    arguments.finish()?;
    match (kind, property.as_str()) {
        (kind, "type") => Err(Failure::new(format!(
            "Property '{kind}.type' is not writable"
        ))),
        (throttle_groups::TYPE, property) => {
            throttle_groups::set(&id, property, value)?;
            done()
        }
        _ => Err(no_property(kind, &property)),
    }
}

fn no_property(kind: &str, property: &str) -> Failure {
    Failure::new(format!("Property '{kind}.{property}' not found"))
}

pub(super) async fn list(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let mut listed = vec![property("type", "string")];
    let path = arguments.clone().need_text("path")?;
    if path == FOLDER {
        arguments.need_text("path")?;
        let parts = daemon.parts.lock().await;
        let threads = parts.iothreads.iter().cloned();
        let ids = threads.chain(throttle_groups::names());
        for id in ids.chain(secret::names()) {
            let kind = object_type(&parts, &id).unwrap_or_default();
            listed.push(property(&id, &format!("child<{kind}>")));
        }
    } else if need_object(&daemon, &mut arguments).await?.1 == throttle_groups::TYPE {
        let all = throttle_groups::property_types();
        listed.extend(all.iter().map(|(name, kind)| property(name, kind)));
    }
    arguments.finish()?;
    Ok(Value::Array(listed))
}

fn property(name: &str, kind: &str) -> Value {
    json!({"name": name, "type": kind})
}

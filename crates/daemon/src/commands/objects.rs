//! Commands that make objects and drop them, and look at their properties and types.

use std::rc::Rc;

use serde_json::{Value, json};
use vellum_graph::{secret, throttle_groups, tls};
use vellum_options::Options;

use crate::daemon::Daemon;
use crate::daemon_state::DaemonState;
use crate::objects::{TYPES, Type};
use crate::qmp::{Arguments, Class, Failure, Outcome};

use super::answers::no_device;
use super::request::request;

/// Where objects stand.
const FOLDER: &str = "/objects";
/// Where character devices stand.
const CHARDEVS: &str = "/chardevs";
const CONTAINER: &str = "container";

/// `object-add`.
pub(crate) struct NewObject {
    options: Options,
    /// What the state file has of it.
    recorded: Option<Value>,
}

impl NewObject {
    /// That of a client, which comes back with the state file.
    pub(super) fn take(arguments: Arguments) -> Result<NewObject, Failure> {
        let words = arguments.to_value();
        Ok(NewObject {
            // What is secret is not written; it has to come from a file, or again.
            recorded: words.get("data").is_none().then_some(words),
            options: arguments.into_options()?,
        })
    }

    /// That of a file of disks, which comes back with that.
    pub(crate) fn of_file(options: Options) -> NewObject {
        NewObject {
            options,
            recorded: None,
        }
    }
}

pub(crate) async fn add(daemon: Rc<Daemon>, request: NewObject) -> Result<(), Failure> {
    let NewObject { options, recorded } = request;
    let mut parts = daemon.parts.lock().await;
    parts.add_object(options)?;
    if let Some(words) = recorded {
        daemon.state.note_object(words);
    }
    Ok(())
}

pub(crate) async fn del(daemon: Rc<Daemon>, id: String) -> Result<(), Failure> {
    let mut parts = daemon.parts.lock().await;
    if parts.objects.remove(&id)?
        || secret::remove(&id)
        || tls::remove(&id)
        || throttle_groups::remove(&id)?
    {
        daemon.state.forget_object(&id);
        return Ok(());
    }
    Err(Failure::new(format!("object '{id}' not found")))
}

/// The names of all objects.
fn object_names(parts: &DaemonState) -> Vec<String> {
    let kept = parts.objects.names().cloned();
    let others = [throttle_groups::names(), secret::names(), tls::names()];
    kept.chain(others.into_iter().flatten()).collect()
}

/// What a path leads to.
enum Place {
    /// A folder, and what stands in it with its type.
    Folder(Vec<(String, String)>),
    Object {
        id: String,
        kind: &'static str,
    },
    Chardev {
        kind: String,
    },
}

impl Place {
    /// That of a path.
    async fn of(daemon: &Daemon, path: &str) -> Result<Place, Failure> {
        let parts = daemon.parts.lock().await;
        let chardevs = || daemon.chardevs.kinds().into_iter();
        let folder = |name: &str| (name.to_owned(), CONTAINER.to_owned());
        let place = match path {
            "" | "/" => Place::Folder(["backend", "objects", "chardevs"].map(folder).into()),
            "/backend" => Place::Folder(Vec::new()),
            CHARDEVS => Place::Folder(chardevs().collect()),
            FOLDER => {
                let names = object_names(&parts).into_iter();
                let typed = names.map(|id| {
                    let kind = parts.object_type(&id).unwrap_or_default();
                    (id, kind.to_owned())
                });
                Place::Folder(typed.collect())
            }
            path => {
                let within = |folder| path.strip_prefix(folder)?.strip_prefix('/');
                let id = within(FOLDER).unwrap_or(path);
                let chardev = within(CHARDEVS).unwrap_or(path);
                match parts.object_type(id) {
                    Some(kind) => Place::Object {
                        id: id.to_owned(),
                        kind,
                    },
                    None => match chardevs().find(|(name, _)| name == chardev) {
                        Some((_, kind)) => Place::Chardev { kind },
                        None => return Err(no_device(path)),
                    },
                }
            }
        };
        Ok(place)
    }

    fn kind(&self) -> &str {
        match self {
            Place::Folder(_) => CONTAINER,
            Place::Object { kind, .. } => kind,
            Place::Chardev { kind } => kind,
        }
    }
}

request! {
    /// `qom-get`.
    pub(super) PropertyRequest {
        path: String = |a| a.need_text("path"),
        property: String = |a| a.need_text("property"),
    }
}

pub(super) async fn get(daemon: Rc<Daemon>, request: PropertyRequest) -> Outcome {
    let PropertyRequest { path, property } = request;
    let place = Place::of(&daemon, &path).await?;
    if property == "type" {
        return Ok(json!(place.kind()));
    }
    if let Place::Object { id, kind } = &place {
        if *kind == throttle_groups::TYPE {
            return Ok(throttle_groups::get(id, &property)?);
        }
        let parts = daemon.parts.lock().await;
        if let Some(value) = parts.objects.get(id, &property) {
            return Ok(value);
        }
        let declared = Type::find(kind).map(Type::properties).unwrap_or_default();
        if declared.iter().any(|(name, _)| *name == property) {
            // What is secret, or forgotten once the object is made.
            return Err(Failure::new(format!(
                "Property '{kind}.{property}' is not readable"
            )));
        }
    }
    Err(no_property(place.kind(), &property))
}

request! {
    /// `qom-set`.
    pub(super) PropertyChange {
        path: String = |a| a.need_text("path"),
        property: String = |a| a.need_text("property"),
        value: Value = |a| a.need_any("value"),
    }
}

pub(super) async fn set(daemon: Rc<Daemon>, request: PropertyChange) -> Result<(), Failure> {
    let PropertyChange {
        path,
        property,
        value,
    } = request;
    let place = Place::of(&daemon, &path).await?;
    if property == "type" {
        return Err(not_writable(place.kind(), &property));
    }
    if let Place::Object { id, kind } = &place {
        if *kind == throttle_groups::TYPE {
            throttle_groups::set(id, &property, value)?;
            return Ok(());
        }
        let mut parts = daemon.parts.lock().await;
        if parts.objects.get(id, &property).is_some() {
            let Some(number) = value.as_u64() else {
                return Err(Failure::new(format!(
                    "Invalid parameter type for '{property}', expected: integer"
                )));
            };
            return match parts.objects.set(id, &property, number) {
                true => Ok(()),
                false => Err(not_writable(kind, &property)),
            };
        }
        let declared = Type::find(kind).map(Type::properties).unwrap_or_default();
        if declared.iter().any(|(name, _)| *name == property) {
            return Err(not_writable(kind, &property));
        }
    }
    Err(no_property(place.kind(), &property))
}

fn not_writable(kind: &str, property: &str) -> Failure {
    Failure::new(format!("Property '{kind}.{property}' is not writable"))
}

fn no_property(kind: &str, property: &str) -> Failure {
    Failure::new(format!("Property '{kind}.{property}' not found"))
}

pub(super) async fn list(daemon: Rc<Daemon>, path: String) -> Outcome {
    let place = Place::of(&daemon, &path).await?;
    let mut listed = vec![property("type", "string")];
    match &place {
        Place::Folder(entries) => {
            let children = entries.iter();
            listed.extend(children.map(|(name, kind)| property(name, &format!("child<{kind}>"))));
        }
        other => listed.extend(properties_of(other.kind())),
    }
    Ok(Value::Array(listed))
}

fn properties_of(kind: &str) -> Vec<Value> {
    let all = Type::find(kind).map(Type::properties).unwrap_or_default();
    all.iter()
        .map(|(name, kind)| property(name, kind))
        .collect()
}

fn property(name: &str, kind: &str) -> Value {
    json!({"name": name, "type": kind})
}

request! {
    /// `qom-list-types`.
    pub(super) TypesRequest {
        implements: Option<String> = |a| a.text("implements"),
        with_abstract: bool = |a| a.is_on("abstract"),
    }
}

pub(super) async fn list_types(_: Rc<Daemon>, request: TypesRequest) -> Outcome {
    let TypesRequest {
        implements,
        with_abstract,
    } = request;
    let is_listed = |one: &&Type| {
        let implemented = implements.as_deref();
        (with_abstract || !one.is_abstract) && implemented.is_none_or(|name| one.implements(name))
    };
    let listed = TYPES.iter().filter(is_listed).map(|one| {
        let mut told = json!({"name": one.name, "parent": one.parent});
        if one.is_abstract {
            told["abstract"] = json!(true);
        }
        told
    });
    Ok(listed.collect())
}

pub(super) async fn list_properties(_: Rc<Daemon>, name: String) -> Outcome {
    if Type::find(&name).is_none() && name != "object" {
        return Err(Failure::of(
            Class::DeviceNotFound,
            format!("Class '{name}' not found"),
        ));
    }
    let mut listed = vec![property("type", "string")];
    listed.extend(properties_of(&name));
    Ok(Value::Array(listed))
}

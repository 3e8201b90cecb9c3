//! Objects: those that are only settings, and the types of all.
//!
//! `iothread`, `main-loop` and `thread-context` name threads. Lanes have no knobs: an object
//! keeps what it was told, and tells it again.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use vellum_graph::throttle_groups;
use vellum_options::Options;

use crate::failure::{Failure, failure, message, refuse_rest};

/// A type of objects: its parent, and its properties with their types.
#[derive(Debug)]
pub(super) struct Type {
    pub(super) name: &'static str,
    pub(super) parent: &'static str,
    pub(super) is_abstract: bool,
    pub(super) properties: &'static [(&'static str, &'static str)],
}

/// What users can make is of this type too.
const USER_CREATABLE: &str = "user-creatable";

const LOOP: [(&str, &str); 3] = [
    ("aio-max-batch", "int"),
    ("thread-pool-max", "int"),
    ("thread-pool-min", "int"),
];
const CREDENTIALS: [(&str, &str); 4] = [
    ("dir", "string"),
    ("endpoint", "QCryptoTLSCredsEndpoint"),
    ("priority", "string"),
    ("verify-peer", "bool"),
];
const SECRET: [(&str, &str); 3] = [
    ("format", "QCryptoSecretFormat"),
    ("iv", "string"),
    ("keyid", "string"),
];

const fn object(
    name: &'static str,
    parent: &'static str,
    properties: &'static [(&'static str, &'static str)],
) -> Type {
    Type {
        name,
        parent,
        is_abstract: false,
        properties,
    }
}

const fn base(name: &'static str, parent: &'static str) -> Type {
    Type {
        name,
        parent,
        is_abstract: true,
        properties: &[],
    }
}

/// Every type, by name. Those of `throttle-group` have more properties.
pub(super) const TYPES: &[Type] = &[
    base("authz", "object"),
    object(
        "authz-list",
        "authz",
        &[("policy", "QAuthZListPolicy"), ("rules", "QAuthZListRule")],
    ),
    object(
        "authz-list-file",
        "authz",
        &[("filename", "string"), ("refresh", "bool")],
    ),
    object("authz-simple", "authz", &[("identity", "string")]),
    base("chardev", "object"),
    base("chardev-fd", "chardev"),
    object("chardev-file", "chardev-fd", &[]),
    object("chardev-memory", "chardev-ringbuf", &[]),
    object("chardev-null", "chardev", &[]),
    object("chardev-pipe", "chardev-fd", &[]),
    object("chardev-pty", "chardev", &[]),
    object("chardev-ringbuf", "chardev", &[]),
    object("chardev-serial", "chardev-fd", &[]),
    object("chardev-socket", "chardev", &[]),
    object("chardev-stdio", "chardev-fd", &[]),
    object("chardev-udp", "chardev", &[]),
    object("container", "object", &[]),
    base("event-loop-base", "object"),
    object(
        "iothread",
        "event-loop-base",
        &[
            LOOP[0],
            LOOP[1],
            LOOP[2],
            ("poll-grow", "int"),
            ("poll-max-ns", "int"),
            ("poll-shrink", "int"),
        ],
    ),
    object("main-loop", "event-loop-base", &LOOP),
    base("secret_common", "object"),
    object(
        "secret",
        "secret_common",
        &[
            SECRET[0],
            SECRET[1],
            SECRET[2],
            ("data", "string"),
            ("file", "string"),
        ],
    ),
    object(
        "secret_keyring",
        "secret_common",
        &[SECRET[0], SECRET[1], SECRET[2], ("serial", "int32_t")],
    ),
    object(
        "thread-context",
        "object",
        &[
            ("cpu-affinity", "int"),
            ("node-affinity", "int"),
            ("thread-id", "int"),
        ],
    ),
    object("throttle-group", "object", &[]),
    base("tls-creds", "object"),
    object("tls-creds-anon", "tls-creds", &CREDENTIALS),
    object(
        "tls-creds-psk",
        "tls-creds",
        &[
            CREDENTIALS[0],
            CREDENTIALS[1],
            CREDENTIALS[2],
            CREDENTIALS[3],
            ("username", "string"),
        ],
    ),
    object(
        "tls-creds-x509",
        "tls-creds",
        &[
            CREDENTIALS[0],
            CREDENTIALS[1],
            CREDENTIALS[2],
            CREDENTIALS[3],
            ("passwordid", "string"),
            ("sanity-check", "bool"),
        ],
    ),
    base(USER_CREATABLE, "interface"),
];

impl Type {
    /// The type of a name.
    pub(super) fn find(name: &str) -> Option<&'static Type> {
        TYPES.iter().find(|one| one.name == name)
    }

    /// Whether a type is another one, or stands on it.
    pub(super) fn implements(&self, name: &str) -> bool {
        let is_made = self.parent == "object" || !self.is_abstract;
        if name == USER_CREATABLE && is_made && is_creatable(self.name) {
            return true;
        }
        self.name == name
            || self.parent == name
            || Type::find(self.parent).is_some_and(|parent| parent.implements(name))
    }

    /// The names of its properties, with their types.
    pub(super) fn properties(&self) -> Vec<(String, &'static str)> {
        match self.name {
            throttle_groups::TYPE => throttle_groups::property_types(),
            _ => {
                let own = self.properties.iter();
                own.map(|(name, kind)| ((*name).to_owned(), *kind))
                    .collect()
            }
        }
    }
}

fn is_creatable(name: &str) -> bool {
    name != "container" && name != "object" && !name.starts_with("chardev")
        // Of the abstract ones only these say so themselves.
        && name != "authz" && name != "tls-creds"
}

/// An object that is only settings.
#[derive(Debug)]
struct Settings {
    kind: &'static str,
    values: BTreeMap<&'static str, Value>,
}

/// Objects that are only settings, by name.
#[derive(Debug, Default)]
pub(super) struct Objects(BTreeMap<String, Settings>);

const IOTHREAD: &str = "iothread";
const MAIN_LOOP: &str = "main-loop";
const THREAD_CONTEXT: &str = "thread-context";

/// The defaults of QEMU's numbers.
const NUMBERS: [(&str, u64); 6] = [
    ("aio-max-batch", 0),
    ("thread-pool-min", 0),
    ("thread-pool-max", 64),
    ("poll-max-ns", 32768),
    ("poll-grow", 0),
    ("poll-shrink", 0),
];

impl Objects {
    /// Whether objects of a type are kept here.
    pub(super) fn keeps(kind: &str) -> bool {
        matches!(kind, IOTHREAD | MAIN_LOOP | THREAD_CONTEXT)
    }

    /// Adds an object of a type that is kept here; nobody has its name.
    ///
    /// # Errors
    /// In QEMU's words.
    pub(super) fn add(&mut self, kind: &str, id: String, options: Options) -> Result<(), Failure> {
        let settings = match kind {
            THREAD_CONTEXT => thread_context(options)?,
            _ => event_loop(kind, options)?,
        };
        let is_second = |other: &Settings| other.kind == MAIN_LOOP;
        if kind == MAIN_LOOP && self.0.values().any(is_second) {
            return Err(message("only one main-loop instance allowed"));
        }
        self.0.insert(id, settings);
        Ok(())
    }

    /// Removes an object; whether there was one.
    ///
    /// # Errors
    /// If it is the main loop, which the program goes on to use.
    pub(super) fn remove(&mut self, id: &str) -> Result<bool, Failure> {
        match self.0.get(id) {
            Some(Settings {
                kind: MAIN_LOOP, ..
            }) => Err(message(format!(
                "object '{id}' is in use, can not be deleted"
            ))),
            _ => Ok(self.0.remove(id).is_some()),
        }
    }

    /// The type of an object.
    pub(super) fn kind(&self, id: &str) -> Option<&'static str> {
        self.0.get(id).map(|settings| settings.kind)
    }

    /// The names of all objects.
    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    /// The names of the threads that exports can name.
    pub(super) fn iothreads(&self) -> Vec<String> {
        let all = self.0.iter();
        let threads = all.filter(|(_, settings)| settings.kind == IOTHREAD);
        threads.map(|(id, _)| id.clone()).collect()
    }

    /// The value of a property.
    pub(super) fn get(&self, id: &str, property: &str) -> Option<Value> {
        self.0.get(id)?.values.get(property).cloned()
    }

    /// Changes a property to another number; whether there is such a one.
    pub(super) fn set(&mut self, id: &str, property: &str, value: u64) -> bool {
        let settings = self.0.get_mut(id);
        let place = settings.and_then(|settings| settings.values.get_mut(property));
        match place {
            Some(place @ Value::Number(_)) => {
                *place = json!(value);
                true
            }
            _ => false,
        }
    }
}

fn event_loop(kind: &str, mut options: Options) -> Result<Settings, Failure> {
    let kind = if kind == IOTHREAD {
        IOTHREAD
    } else {
        MAIN_LOOP
    };
    let mut values = BTreeMap::new();
    for (name, default) in NUMBERS {
        if kind == IOTHREAD || !name.starts_with("poll-") {
            let value = options.take_size(name).map_err(failure)?;
            values.insert(name, json!(value.unwrap_or(default)));
        }
    }
    refuse_rest(&options)?;
    Ok(Settings { kind, values })
}

fn thread_context(mut options: Options) -> Result<Settings, Failure> {
    let mut list = |key: &'static str| {
        let mut numbers = Vec::new();
        let mut group = options.take_group(key);
        let keys: Vec<String> = group.keys().map(str::to_owned).collect();
        for key in keys {
            numbers.extend(group.take_number(&key).map_err(failure)?);
        }
        Ok::<_, Failure>(numbers)
    };
    let (mut cpus, nodes) = (list("cpu-affinity")?, list("node-affinity")?);
    if !cpus.is_empty() && !nodes.is_empty() {
        return Err(message("Mixing CPU and node affinity not supported"));
    }
    refuse_rest(&options)?;
    if cpus.is_empty() {
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        cpus.extend(0..count as u64);
    }
    let values = BTreeMap::from([
        ("cpu-affinity", json!(cpus)),
        ("thread-id", json!(std::process::id())),
    ]);
    Ok(Settings {
        kind: THREAD_CONTEXT,
        values,
    })
}

/// What `--object help` prints, or `--object TYPE,help`; `None` if there is no such type.
pub fn object_help(kind: Option<&str>) -> Option<String> {
    let Some(kind) = kind else {
        let mut text = "List of user creatable objects:\n".to_owned();
        for one in TYPES.iter().filter(|one| !one.is_abstract) {
            if one.implements(USER_CREATABLE) {
                text.push_str(&format!("  {}\n", one.name));
            }
        }
        return Some(text);
    };
    let found = Type::find(kind).filter(|one| !one.is_abstract)?;
    let mut text = format!("{kind} options:\n");
    let mut properties = found.properties();
    properties.sort();
    // What can only be read is no option.
    for (name, kind) in properties.iter().filter(|(name, _)| name != "thread-id") {
        text.push_str(&format!("  {name}=<{kind}>\n"));
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_are_types_too() {
        let roots = ["object", "interface"];
        for one in TYPES {
            let known = roots.contains(&one.parent) || Type::find(one.parent).is_some();
            assert!(known, "{one:?}");
        }
    }

    #[test]
    fn objects_are_kept_and_told() {
        let mut objects = Objects::default();
        let options = Options::parse("poll-max-ns=5").unwrap();
        objects.add("iothread", "t".into(), options).unwrap();
        assert_eq!(objects.get("t", "poll-max-ns"), Some(json!(5)));
        assert_eq!(objects.get("t", "thread-pool-max"), Some(json!(64)));
        assert!(objects.set("t", "poll-grow", 3) && !objects.set("t", "no", 3));
        let none = Options::new;
        objects.add("main-loop", "m".into(), none()).unwrap();
        let second = objects.add("main-loop", "n".into(), none());
        assert_eq!(second.unwrap_err().0, "only one main-loop instance allowed");
        assert!(objects.remove("m").is_err() && objects.remove("t").unwrap());
    }
}

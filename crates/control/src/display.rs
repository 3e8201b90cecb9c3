//! The names of images for people: a file name, or a name of a protocol, where that
//! opens the same graph again; otherwise `json:{...}` with the options that say what is
//! seen, and none that only say how.

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::foreign;
use crate::json;
use crate::nbd_name;
use crate::open::node_options;
use crate::options::{Options, Scalar};
use crate::ova;
use crate::rbd_name;
use crate::repository;
use crate::spec::ImageSpec;
use crate::ssh_name;
use crate::url_name;

/// What is known of a driver's names.
#[derive(Clone, Copy)]
struct Naming {
    driver: &'static str,
    /// Options that change what is seen through the node; `x.` stands for all below it.
    in_name: &'static [&'static str],
    /// Children, the one that a name could stand for first.
    children: &'static [&'static str],
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Its child's name opens it, by probing or with `-f`.
    Format,
    /// No name opens it.
    Filter,
    /// Has names of its own: `DRIVER:...`.
    Protocol,
}

const NAMINGS: [Naming; 13] = [
    naming("raw", &["offset", "size"], &["file"], Kind::Format),
    naming("luks", &["key-secret"], &["header", "file"], Kind::Format),
    naming(
        "qcow2",
        &["encrypt.format", "encrypt.key-secret"],
        &["file"],
        Kind::Format,
    ),
    naming(
        "blkdebug",
        &["config", "inject-error.", "set-state."],
        &["image"],
        Kind::Protocol,
    ),
    naming("blkverify", &[], &["raw", "test"], Kind::Protocol),
    naming("null-co", &["size"], &[], Kind::Protocol),
    naming("null-aio", &["size"], &[], Kind::Protocol),
    naming("ova", &["member"], &["file"], Kind::Protocol),
    naming("copy-on-read", &["bottom"], &["file"], Kind::Filter),
    naming("throttle", &["throttle-group"], &["file"], Kind::Filter),
    naming(
        "cache",
        &[
            "directory",
            "limit",
            "outage",
            "prefetch",
            "prefetch-speed",
            "readahead",
            "trace",
            "version",
        ],
        &["file"],
        Kind::Filter,
    ),
    naming("blklogwrites", &[], &["file", "log"], Kind::Filter),
    naming("preallocate", &[], &["file"], Kind::Filter),
];

/// What is known of a driver's names.
fn naming_of(driver: &str) -> Option<Naming> {
    let found = NAMINGS.iter().find(|naming| naming.driver == driver);
    let foreign = || {
        let format = foreign::find(driver)?;
        Some(naming(format.name, format.options, &["file"], Kind::Format))
    };
    found.copied().or_else(foreign)
}

const fn naming(
    driver: &'static str,
    in_name: &'static [&'static str],
    children: &'static [&'static str],
    kind: Kind,
) -> Naming {
    Naming {
        driver,
        in_name,
        children,
        kind,
    }
}

/// Whether a place may be empty: a header that does not stand apart.
pub fn is_optional(key: &str) -> bool {
    key == "header"
}

/// The places below nodes of a driver, by their names in options.
pub fn child_keys(driver: &str) -> &'static [&'static str] {
    naming_of(driver).map_or(&[], |naming| naming.children)
}

/// The name of a node.
#[derive(Debug, Clone)]
pub(crate) struct Name {
    /// One that opens the node again.
    plain: Option<String>,
    /// Whether that is the name of a protocol: what a format may stand on unsaid.
    is_protocol: bool,
    json: Arc<Described>,
}

/// The options that say what is seen. Most names are plain, and nobody asks for these.
#[derive(Debug, Clone)]
struct Described {
    /// What of them is of the node itself.
    own: Map<String, Value>,
    children: Vec<(&'static str, Arc<Described>)>,
    backing: Option<Value>,
}

impl Described {
    fn json(&self) -> Value {
        let mut json = self.own.clone();
        for (key, child) in &self.children {
            json.insert((*key).to_owned(), child.json());
        }
        if let Some(backing) = &self.backing {
            json.insert("backing".to_owned(), backing.clone());
        }
        Value::Object(json)
    }
}

/// The name of an image of a given format for people.
pub fn display_name(spec: &ImageSpec, format: &str) -> String {
    let name = node_options(spec).ok();
    match name.and_then(|options| name_of(options, format)) {
        None => spec.name.clone(),
        Some(name) => name.text(),
    }
}

impl Name {
    pub(crate) fn text(&self) -> String {
        match &self.plain {
            Some(plain) => plain.clone(),
            None => {
                format!("json:{}", json::compact(&self.json()))
            }
        }
    }

    /// The options that say what is seen.
    pub(crate) fn json(&self) -> Value {
        self.json.json()
    }
}

/// The name of an open node, by the names of those that it stands on. `backing`: what it shows
/// where it has nothing, if that is not what it would be opened with; null for nothing.
pub(crate) fn name_of_node(
    driver: &str,
    options: &Options,
    child: impl Fn(&str) -> Option<Name>,
    backing: Option<Value>,
) -> Option<Name> {
    if let Some(name) = name_of_leaf(driver, options) {
        return Some(name);
    }
    let naming = naming_of(driver)?;
    let mut children = Vec::new();
    for key in naming.children {
        match child(key) {
            Some(child) => children.push((*key, child)),
            None if is_optional(key) => {}
            None => return None,
        }
    }
    Some(composed(&naming, options, children, backing))
}

/// The name of the node that options describe; `None` for what has none here.
fn name_of(mut options: Options, default_driver: &str) -> Option<Name> {
    let driver = match options.take("driver") {
        None => default_driver.to_owned(),
        Some(Scalar::Text(driver)) => driver,
        Some(_) => return None,
    };
    if let Some(name) = name_of_leaf(&driver, &options) {
        return Some(name);
    }
    let naming = naming_of(&driver)?;
    let mut children = Vec::new();
    for key in naming.children {
        // A format that stands on no child of its own was named by its file.
        let below = match options.take_group(key) {
            below if below.is_empty() && is_optional(key) => continue,
            below if below.is_empty() && naming.kind == Kind::Format => options.clone(),
            below => below,
        };
        children.push((*key, name_of(below, "file")?));
    }
    let backing = options.take_group("backing");
    let backing = (!backing.is_empty()).then(|| backing.to_json());
    Some(composed(&naming, &options, children, backing))
}

/// The name of a node that stands on none.
fn name_of_leaf(driver: &str, options: &Options) -> Option<Name> {
    let mut json = Map::new();
    json.insert("driver".to_owned(), driver.into());
    let plain = match driver {
        "file" | "host_device" | "host_cdrom" => {
            let filename = options.get_text("filename")?;
            json.insert("filename".to_owned(), filename.into());
            Some(filename.to_owned())
        }
        "nbd" => {
            json.extend(nbd_naming_options(options));
            nbd_name::name_of(options)
        }
        driver if url_name::is_scheme(driver) => {
            let (plain, named) = url_name::name_of(options);
            json.extend(named);
            plain
        }
        repository::DRIVER => {
            let (plain, named) = repository::name_of(options);
            json.extend(named);
            plain
        }
        rbd_name::SCHEME | ssh_name::SCHEME => {
            let (plain, named) = match driver {
                rbd_name::SCHEME => rbd_name::name_of(options),
                _ => ssh_name::name_of(options),
            };
            json.extend(named);
            plain
        }
        _ => return None,
    };
    let described = Described {
        own: json,
        children: Vec::new(),
        backing: None,
    };
    Some(Name {
        plain,
        is_protocol: true,
        json: Arc::new(described),
    })
}

fn composed(
    naming: &Naming,
    options: &Options,
    children: Vec<(&'static str, Name)>,
    backing: Option<Value>,
) -> Name {
    let mut own = Map::new();
    own.insert("driver".to_owned(), naming.driver.into());
    let has_options = take_naming_options(naming, options, &mut own);
    let described = children
        .iter()
        .map(|(key, child)| (*key, child.json.clone()));
    let described = described.collect();
    let children: Vec<Name> = children.into_iter().map(|(_, child)| child).collect();
    let plain = match &backing {
        Some(_) => None,
        None => plain(naming, options, &children, has_options),
    };
    Name {
        plain,
        is_protocol: naming.kind == Kind::Protocol,
        json: Arc::new(Described {
            own,
            children: described,
            backing,
        }),
    }
}

/// What says which export a node is.
fn nbd_naming_options(options: &Options) -> impl Iterator<Item = (String, Value)> {
    let names = |key: &str| {
        matches!(
            key,
            "path" | "host" | "port" | "export" | "tls-creds" | "tls-hostname"
        ) || key.starts_with("server.")
    };
    options
        .iter()
        .filter(move |(key, _)| names(key))
        .map(|(key, value)| (key.to_owned(), value.clone().into()))
}

/// Puts the options that belong to the name into `json`; says whether there were any.
fn take_naming_options(naming: &Naming, options: &Options, json: &mut Map<String, Value>) -> bool {
    let mut found = false;
    for (key, value) in options.iter() {
        let in_name = naming
            .in_name
            .iter()
            .any(|known| match known.ends_with('.') {
                true => key.starts_with(known),
                false => key == *known,
            });
        if in_name {
            json.insert(key.to_owned(), value.clone().into());
            found = true;
        }
    }
    found
}

/// The name that opens a node of given children again.
fn plain(
    naming: &Naming,
    options: &Options,
    children: &[Name],
    has_options: bool,
) -> Option<String> {
    let driver = naming.driver;
    let child = |at: usize| children.get(at).and_then(|child| child.plain.as_deref());
    match (naming.kind, driver) {
        (Kind::Filter, _) => None,
        (Kind::Format, _) => {
            let alone = !has_options && children.len() == 1;
            let below = children.first().filter(|below| below.is_protocol && alone);
            below.and_then(|below| below.plain.clone())
        }
        (Kind::Protocol, "blkdebug") => {
            let config = options.get_text("config");
            let rules =
                |key: &str| key.starts_with("inject-error.") || key.starts_with("set-state.");
            match options.keys().any(rules) {
                true => None,
                false => Some(format!("blkdebug:{}:{}", config.unwrap_or(""), child(0)?)),
            }
        }
        (Kind::Protocol, "blkverify") => Some(format!("blkverify:{}:{}", child(0)?, child(1)?)),
        (Kind::Protocol, ova::DRIVER) => ova::name_of(child(0)?, options),
        (Kind::Protocol, _) => (!has_options).then(|| format!("{driver}://")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_opens_the_same_graph_again() {
        for (options, name) in [
            ("driver=qcow2,file.filename=a,read-only=on", "a"),
            ("file.filename=a", "a"),
            ("driver=file,filename=a", "a"),
            (
                "driver=qcow2,file.driver=blkdebug,file.image.filename=a",
                "blkdebug::a",
            ),
            (
                "driver=blkdebug,config=c,image.filename=a,align=4k",
                "blkdebug:c:a",
            ),
            (
                "driver=blkverify,raw.filename=a,test.driver=qcow2,test.file.filename=b",
                "blkverify:a:b",
            ),
            ("driver=null-co", "null-co://"),
            (
                "driver=null-co,size=1M",
                r#"json:{"driver": "null-co", "size": "1M"}"#,
            ),
            (
                "driver=raw,size=1k,offset=1k,file.filename=a",
                r#"json:{"offset": "1k", "driver": "raw", "size": "1k", "file": {"driver": "file", "filename": "a"}}"#,
            ),
            (
                "driver=cache,directory=d,record-trace=on,file.driver=s3,file.url=s3://b/k,file.readahead=0",
                r#"json:{"driver": "cache", "file": {"url": "s3://b/k", "driver": "s3"}, "directory": "d"}"#,
            ),
            (
                "driver=throttle,throttle-group=t,file.filename=a",
                r#"json:{"throttle-group": "t", "driver": "throttle", "file": {"driver": "file", "filename": "a"}}"#,
            ),
            (
                "driver=raw,file.driver=qcow2,file.file.filename=a",
                r#"json:{"driver": "raw", "file": {"driver": "qcow2", "file": {"driver": "file", "filename": "a"}}}"#,
            ),
        ] {
            let spec = ImageSpec::image_opts(options).unwrap();
            assert_eq!(display_name(&spec, "qcow2"), name, "{options}");
        }
        let strange = ImageSpec::image_opts("driver=qcow2,file=node").unwrap();
        assert_eq!(display_name(&strange, "qcow2"), "driver=qcow2,file=node");
    }
}

//! The names of images for people: a file name, or a name of a protocol, where that
//! opens the same graph again; otherwise `json:{...}` with the options that say what is
//! seen, and none that only say how.

use std::borrow::Cow;
use std::rc::Rc;

use serde_json::{Map, Value};
use vellum_options::{
    ImageSpec, Options, Scalar, json, nbd_name, ova_name, rbd_name, repository_name, ssh_name,
    url_name,
};

use crate::foreign;

/// What is known of a driver's names.
#[derive(Debug, Clone, Copy)]
struct Naming {
    driver: &'static str,
    /// Options that change what is seen through the node; `x.` stands for all below it.
    in_name: &'static [&'static str],
    /// Children, the one that a name could stand for first.
    children: &'static [&'static str],
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    naming("qcow2", &["encrypt.key-secret"], &["file"], Kind::Format),
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
pub(crate) struct Name<'a> {
    /// One that opens the node again.
    plain: Option<Rc<str>>,
    /// Whether that is the name of a protocol: what a format may stand on unsaid.
    is_protocol: bool,
    described: Rc<Described<'a>>,
}

/// What the options that say what is seen are made from. Most names are plain, and nobody asks for
/// these.
#[derive(Debug)]
struct Described<'a> {
    driver: Cow<'a, str>,
    /// None for a node that stands on none.
    naming: Option<Naming>,
    options: Cow<'a, Options>,
    children: Vec<(&'static str, Rc<Described<'a>>)>,
    backing: Option<Value>,
}

impl Described<'_> {
    fn json(&self) -> Value {
        let mut json = Map::new();
        json.insert("driver".to_owned(), (*self.driver).into());
        match &self.naming {
            None => json.extend(leaf_options(&self.driver, &self.options)),
            Some(naming) => json.extend(naming_options(naming, &self.options)),
        }
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
    let name = spec.options().ok();
    match name.and_then(|options| name_of(options, format)) {
        None => spec.name.clone(),
        Some(name) => name.text(),
    }
}

impl Name<'_> {
    pub(crate) fn text(&self) -> String {
        match &self.plain {
            Some(plain) => plain.to_string(),
            None => {
                format!("json:{}", json::compact(&self.json()))
            }
        }
    }

    /// The options that say what is seen.
    pub(crate) fn json(&self) -> Value {
        self.described.json()
    }
}

/// The name of an open node, by the names of those that it stands on. `backing`: what it shows
/// where it has nothing, if that is not what it would be opened with; null for nothing.
pub(crate) fn name_of_node<'a>(
    driver: Cow<'a, str>,
    options: Cow<'a, Options>,
    child: impl Fn(&str) -> Option<Name<'a>>,
    backing: Option<Value>,
) -> Option<Name<'a>> {
    if is_leaf(&driver) {
        return name_of_leaf(driver, options);
    }
    let naming = naming_of(&driver)?;
    let mut children = Vec::new();
    for key in naming.children {
        match child(key) {
            Some(child) => children.push((*key, child)),
            None if is_optional(key) => {}
            None => return None,
        }
    }
    Some(composed(naming, options, children, backing))
}

/// The name of the node that options describe; `None` for what has none here.
fn name_of(mut options: Options, default_driver: &str) -> Option<Name<'static>> {
    let driver = match options.take("driver") {
        None => default_driver.to_owned(),
        Some(Scalar::Text(driver)) => driver,
        Some(_) => return None,
    };
    if is_leaf(&driver) {
        return name_of_leaf(driver.into(), Cow::Owned(options));
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
    Some(composed(naming, Cow::Owned(options), children, backing))
}

/// Whether nodes of a driver stand on none.
fn is_leaf(driver: &str) -> bool {
    is_host_file(driver)
        || matches!(
            driver,
            "nbd" | repository_name::DRIVER | rbd_name::SCHEME | ssh_name::SCHEME
        )
        || url_name::is_scheme(driver)
}

fn is_host_file(driver: &str) -> bool {
    matches!(driver, "file" | "host_device" | "host_cdrom")
}

/// The name of a node that stands on none.
fn name_of_leaf<'a>(driver: Cow<'a, str>, options: Cow<'a, Options>) -> Option<Name<'a>> {
    let plain = match &*driver {
        driver if is_host_file(driver) => Some(Rc::from(options.get_text("filename")?)),
        "nbd" => nbd_name::name_of(&options).map(Rc::from),
        driver => remote_name(driver, &options).0.map(Rc::from),
    };
    Some(Name {
        plain,
        is_protocol: true,
        described: Rc::new(Described {
            driver,
            naming: None,
            options,
            children: Vec::new(),
            backing: None,
        }),
    })
}

/// The options that a node which stands on none is named by.
fn leaf_options(driver: &str, options: &Options) -> Vec<(String, Value)> {
    match driver {
        driver if is_host_file(driver) => {
            let filename = options.get_text("filename").unwrap_or_default();
            vec![("filename".to_owned(), filename.into())]
        }
        "nbd" => nbd_naming_options(options).collect(),
        driver => remote_name(driver, options).1,
    }
}

/// The name of what is on another machine, and the options that it is made of.
fn remote_name(driver: &str, options: &Options) -> (Option<String>, Vec<(String, Value)>) {
    match driver {
        repository_name::DRIVER => repository_name::name_of(options),
        rbd_name::SCHEME => rbd_name::name_of(options),
        ssh_name::SCHEME => ssh_name::name_of(options),
        _ => url_name::name_of(options),
    }
}

fn composed<'a>(
    naming: Naming,
    options: Cow<'a, Options>,
    children: Vec<(&'static str, Name<'a>)>,
    backing: Option<Value>,
) -> Name<'a> {
    let plain = match &backing {
        Some(_) => None,
        None => plain(&naming, &options, &children),
    };
    let described = children.into_iter();
    let described = described.map(|(key, child)| (key, child.described));
    Name {
        plain,
        is_protocol: naming.kind == Kind::Protocol,
        described: Rc::new(Described {
            driver: Cow::Borrowed(naming.driver),
            naming: Some(naming),
            options,
            children: described.collect(),
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

/// The options that belong to the name.
fn naming_options(naming: &Naming, options: &Options) -> impl Iterator<Item = (String, Value)> {
    let in_name = naming.in_name;
    let is_in_name = move |key: &str| {
        in_name.iter().any(|known| match known.ends_with('.') {
            true => key.starts_with(known),
            false => key == *known,
        })
    };
    options
        .iter()
        .filter(move |(key, _)| is_in_name(key))
        .map(|(key, value)| (key.to_owned(), value.clone().into()))
}

/// The name that opens a node of given children again.
fn plain(
    naming: &Naming,
    options: &Options,
    children: &[(&'static str, Name<'_>)],
) -> Option<Rc<str>> {
    let driver = naming.driver;
    let child = |at: usize| {
        children
            .get(at)
            .and_then(|(_, child)| child.plain.as_deref())
    };
    let has_options = || naming_options(naming, options).next().is_some();
    let composed = match (naming.kind, driver) {
        (Kind::Filter, _) => return None,
        (Kind::Format, _) => {
            let alone = children.len() == 1 && !has_options();
            let (_, below) = children.first()?;
            return below.plain.clone().filter(|_| below.is_protocol && alone);
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
        (Kind::Protocol, ova_name::DRIVER) => ova_name::name_of(child(0)?, options),
        (Kind::Protocol, _) => (!has_options()).then(|| format!("{driver}://")),
    };
    composed.map(Rc::from)
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

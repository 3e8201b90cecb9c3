//! What an open node is called for people, by the names of those that it stands on.

use std::borrow::Cow;
use std::rc::Rc;

use serde_json::{Map, Value};
use vellum_options::{
    Options, json, nbd_name, ova_name, rbd_name, repository_name, ssh_name, url_name,
};

use crate::node::driver::{DriverFacts, Naming, NamingKind};

/// Whether a place may be empty: a header that does not stand apart.
pub fn is_optional(key: &str) -> bool {
    key == "header"
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
    driver: DriverFacts,
    options: Cow<'a, Options>,
    child: impl Fn(&str) -> Option<Name<'a>>,
    backing: Option<Value>,
) -> Option<Name<'a>> {
    if is_leaf(driver.name) {
        return name_of_leaf(Cow::Borrowed(driver.name), options);
    }
    let naming = driver.naming?;
    let mut children = Vec::new();
    for key in naming.children {
        match child(key) {
            Some(child) => children.push((*key, child)),
            None if is_optional(key) => {}
            None => return None,
        }
    }
    Some(composed((driver.name, naming), options, children, backing))
}

/// Whether nodes of a driver stand on none.
pub(crate) fn is_leaf(driver: &str) -> bool {
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
pub(crate) fn name_of_leaf<'a>(
    driver: Cow<'a, str>,
    options: Cow<'a, Options>,
) -> Option<Name<'a>> {
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

pub(crate) fn composed<'a>(
    (driver, naming): (&'static str, Naming),
    options: Cow<'a, Options>,
    children: Vec<(&'static str, Name<'a>)>,
    backing: Option<Value>,
) -> Name<'a> {
    let plain = match &backing {
        Some(_) => None,
        None => plain((driver, &naming), &options, &children),
    };
    let described = children.into_iter();
    let described = described.map(|(key, child)| (key, child.described));
    Name {
        plain,
        is_protocol: naming.kind == NamingKind::Protocol,
        described: Rc::new(Described {
            driver: Cow::Borrowed(driver),
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
        let mut in_name = in_name.iter().copied().flatten();
        in_name.any(|known| match known.ends_with('.') {
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
    (driver, naming): (&str, &Naming),
    options: &Options,
    children: &[(&'static str, Name<'_>)],
) -> Option<Rc<str>> {
    let child = |at: usize| {
        children
            .get(at)
            .and_then(|(_, child)| child.plain.as_deref())
    };
    let has_options = || naming_options(naming, options).next().is_some();
    let composed = match (naming.kind, driver) {
        (NamingKind::Filter, _) => return None,
        (NamingKind::Format, _) => {
            let alone = children.len() == 1 && !has_options();
            let (_, below) = children.first()?;
            return below.plain.clone().filter(|_| below.is_protocol && alone);
        }
        (NamingKind::Protocol, "blkdebug") => {
            let config = options.get_text("config");
            let rules =
                |key: &str| key.starts_with("inject-error.") || key.starts_with("set-state.");
            match options.keys().any(rules) {
                true => None,
                false => Some(format!("blkdebug:{}:{}", config.unwrap_or(""), child(0)?)),
            }
        }
        (NamingKind::Protocol, "blkverify") => {
            Some(format!("blkverify:{}:{}", child(0)?, child(1)?))
        }
        (NamingKind::Protocol, ova_name::DRIVER) => ova_name::name_of(child(0)?, options),
        (NamingKind::Protocol, _) => (!has_options()).then(|| format!("{driver}://")),
    };
    composed.map(Rc::from)
}

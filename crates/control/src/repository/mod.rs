//! Disks in repositories: how they are named, and where the store is.
//!
//! A name is `LOCATION[:TAG[@NUMBER]]`, where LOCATION is a folder, or a place in an object store
//! (`s3://BUCKET/PREFIX`); or `json:{...}` with the options of the node `repository`, which are those of
//! the store beside `path` or `url`, `tag` and `number`.

#[cfg(feature = "s3")]
mod bucket;
mod tracking;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum::{Error, ErrorKind, Result};
use vellum_repository::{
    DiskName, FolderObjects, Objects, PushId, Repository, TagName, check_folder,
};

use crate::graph::{invalid, refuse_unknown};
use crate::options::{Options, Scalar};
use crate::url_name;

pub use tracking::{Tracking, dirty_of};

/// The driver's name, and what file names of such disks begin with.
pub const DRIVER: &str = "repository";

/// The options of the node that a name means: `path` or `url`, `tag`, `number`, and others if it is
/// `json:{}`.
///
/// # Errors
/// If it names no repository.
pub fn options(name: &str) -> Result<Options> {
    if let Some(json) = name.strip_prefix("json:") {
        let mut options = Options::from_json(json)?;
        let driver = options.take_text("driver")?;
        if driver.is_some_and(|driver| driver != DRIVER) {
            return Err(invalid(format!("'{name}' names no repository")));
        }
        return Ok(options);
    }
    let (location, disk) = split(name);
    let mut options = Options::new();
    let scheme = location.split_once("://").map(|(scheme, _)| scheme);
    match scheme {
        Some(scheme) if url_name::is_store(scheme) => options.set_text("url", location),
        Some(scheme) => {
            return Err(invalid(format!(
                "a repository is in a folder or an object store (s3://, gs://, az://), not at \
                 '{scheme}://'"
            )));
        }
        None if location.is_empty() => return Err(invalid("a repository's name is empty")),
        None => options.set_text("path", location),
    }
    if disk.is_none() {
        refuse_doubtful(location)?;
    }
    if let Some(disk) = disk {
        let disk = DiskName::parse(disk)?;
        options.set_text("tag", disk.tag.as_str());
        if let Some(number) = disk.number {
            options.set("number", Scalar::Number(number.into()));
        }
    }
    Ok(options)
}

/// The name, where it alone opens the same disk again, and the options that say what is seen.
pub(crate) fn name_of(options: &Options) -> (Option<String>, Vec<(String, serde_json::Value)>) {
    let own = ["path", "tag", "number", "push"];
    let mut store = options.clone();
    let [path, tag, number, push] = own.map(|key| store.take(key));
    let (url, named) = url_name::name_of(&store);
    let text = |value: Scalar| match value {
        Scalar::Text(text) => text,
        other => serde_json::Value::from(other).to_string(),
    };
    // Of a store, the URL says all unless others count.
    let location = path.clone().map(text).or(url);
    // A name has no place for the push.
    let location = location.filter(|_| push.is_none());
    let plain = location.map(|location| {
        let tag = tag
            .clone()
            .map_or_else(|| TagName::default().to_string(), text);
        let number = number
            .clone()
            .map_or_else(String::new, |number| format!("@{}", text(number)));
        format!("{DRIVER}:{location}:{tag}{number}")
    });
    let own = own.into_iter().zip([path, tag, number, push]);
    let own = own.filter_map(|(key, value)| Some((key.to_owned(), value?.into())));
    (plain, own.chain(named).collect())
}

/// Cuts the disk's name off: what is behind the last colon, unless a slash comes later.
fn split(name: &str) -> (&str, Option<&str>) {
    match name.rsplit_once(':') {
        Some((location, disk)) if !disk.contains('/') => (location, Some(disk)),
        _ => (name, None),
    }
}

/// Refuses a location that a colon is in the middle of, unless it is a folder which is there: what is behind was meant
/// for a tag, and a repository that nobody wants would be made.
fn refuse_doubtful(location: &str) -> Result<()> {
    let place = location
        .split_once("://")
        .map_or(location, |(_, place)| place);
    let Some((_, disk)) = place.rsplit_once(':') else {
        return Ok(());
    };
    if place.len() == location.len() && Path::new(location).is_dir() {
        return Ok(());
    }
    // Text with a slash never is one.
    DiskName::parse(disk).map(drop).map_err(|error| {
        let why = error.message();
        invalid(format!(
            "{why}; a repository that is called '{location}' is named by json:{{}}, or is a folder that is there"
        ))
    })
}

/// Takes the disk out of a node's options.
pub(crate) fn take_disk(options: &mut Options) -> Result<DiskName> {
    let tag = options.take_text("tag")?;
    let tag = tag.map_or_else(|| Ok(TagName::default()), |tag| TagName::parse(&tag))?;
    let number = options.take_number("number")?;
    if number == Some(0) {
        return Err(invalid("the disks of a tag are numbered from 1"));
    }
    Ok(DiskName { tag, number })
}

/// Takes the push out of a node's options that must have made the disk.
pub(crate) fn take_push(options: &mut Options) -> Result<Option<PushId>> {
    let Some(text) = options.take_text("push")? else {
        return Ok(None);
    };
    let push = PushId::parse(&text);
    push.map(Some)
        .ok_or_else(|| invalid(format!("'{text}' is no name of a push")))
}

/// A disk that was made by another push than what stands on it knows.
pub(crate) fn another_disk(disk: &DiskName) -> Error {
    let message =
        format!("'{disk}' is another disk now: the repository, or the tag, was made anew");
    Error::new(ErrorKind::Changed, "open", message)
}

/// The store of a node's options; takes these.
pub(crate) fn take_objects(options: &mut Options) -> Result<Arc<dyn Objects>> {
    let path = options.take_text("path")?;
    match (path, options.contains("url")) {
        (Some(path), false) => {
            refuse_unknown(options, DRIVER)?;
            let folder = absolute(&path)?;
            check_folder(&folder)?;
            Ok(Arc::new(FolderObjects::new(folder)))
        }
        (None, true) => take_bucket(options),
        _ => Err(invalid(
            "repository driver requires a 'path' or a 'url' option",
        )),
    }
}

/// A folder's name that means the same from everywhere.
fn absolute(path: &str) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| Error::from_io("open", &error).target(path))
}

#[cfg(feature = "s3")]
fn take_bucket(options: &mut Options) -> Result<Arc<dyn Objects>> {
    let scheme = options
        .get_text("url")
        .and_then(|url| url.split_once("://"));
    let scheme = scheme
        .map(|(scheme, _)| scheme)
        .filter(|scheme| url_name::is_store(scheme));
    let Some(scheme) = scheme.map(str::to_owned) else {
        return Err(invalid(
            "a repository's URL begins with s3://, gs:// or az://",
        ));
    };
    let object = crate::drivers::object_options(&scheme, options)?;
    refuse_unknown(options, DRIVER)?;
    Ok(Arc::new(bucket::BucketObjects::new(&object)?))
}

#[cfg(not(feature = "s3"))]
fn take_bucket(_options: &mut Options) -> Result<Arc<dyn Objects>> {
    let message = "repositories in object stores require a build with the feature 's3'";
    Err(Error::new(ErrorKind::Unsupported, "open", message))
}

/// A repository and a disk of it, as a user has named them.
#[derive(Debug)]
pub struct Named {
    /// The store.
    pub objects: Arc<dyn Objects>,
    /// The disk.
    pub disk: DiskName,
    options: Options,
}

impl Named {
    /// Takes a name apart.
    ///
    /// # Errors
    /// If it names no repository, or the options make no sense.
    pub fn parse(name: &str) -> Result<Self> {
        let mut options = options(name)?;
        if let Some(path) = options.get_text("path") {
            let path = absolute(path)?.to_string_lossy().into_owned();
            options.set_text("path", path);
        }
        let mut rest = options.clone();
        take_push(&mut rest)?;
        let disk = take_disk(&mut rest)?;
        let objects = take_objects(&mut rest)?;
        Ok(Named {
            objects,
            disk,
            options,
        })
    }

    /// Refuses a name with a number, where all disks of a tag are meant.
    ///
    /// # Errors
    /// If it has one.
    pub fn refuse_number(&self) -> Result<()> {
        match self.disk.number {
            None => Ok(()),
            Some(_) => Err(invalid("name a tag, and no number of it")),
        }
    }

    /// Opens the repository.
    ///
    /// # Errors
    /// If there is none.
    pub async fn open(&self) -> Result<Repository> {
        Repository::open(self.objects.clone()).await
    }

    /// The options of a node that shows the disk with this number, and no other one that comes to have
    /// it: the one that this push has made.
    pub fn node(&self, number: u64, push: PushId) -> serde_json::Value {
        let mut options = self.options.clone();
        options.set_text("driver", DRIVER);
        options.set_text("tag", self.disk.tag.as_str());
        options.set("number", Scalar::Number(number.into()));
        options.set_text("push", push.to_string());
        options.to_json()
    }
}

/// What is wrong with a place that does not hold what it should.
pub(crate) fn refuse_writes() -> Error {
    Error::new(
        ErrorKind::ReadOnly,
        "open",
        "a disk in a repository is read-only: make an overlay on it ('vellum open'), and push that",
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_taken_apart() {
        let told = |name: &str| options(name).map(|options| options.to_json());
        assert_eq!(told("/mnt/r").unwrap(), json!({"path": "/mnt/r"}));
        let full = json!({"path": "/a:b/r", "tag": "vm", "number": 3});
        assert_eq!(told("/a:b/r:vm@3").unwrap(), full);
        let url = json!({"url": "s3://b/r", "tag": "vm"});
        assert_eq!(told("s3://b/r:vm").unwrap(), url);
        assert_eq!(told("s3://b/r").unwrap(), json!({"url": "s3://b/r"}));
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("r:a/b");
        std::fs::create_dir_all(&inner).unwrap();
        let inner = inner.to_str().unwrap();
        assert_eq!(told(inner).unwrap(), json!({"path": inner}));
        let json = r#"json:{"driver":"repository","path":"r:a/b"}"#;
        assert_eq!(told(json).unwrap(), json!({"path": "r:a/b"}));
        let json = r#"json:{"driver":"repository","url":"s3://b/r","endpoint":"http://h"}"#;
        assert_eq!(
            told(json).unwrap(),
            json!({"url": "s3://b/r", "endpoint": "http://h"})
        );
        for wrong in [
            "",
            ":x",
            "https://h/r",
            "/r:a b",
            "/r:vm@x",
            "r:a/b",
            "/nowhere/r:a/b",
            "s3://b/r:a/b",
            r#"json:{"driver":"file"}"#,
        ] {
            assert!(told(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_node_names_the_same_disk_again() {
        let named = Named::parse("/nowhere/r:vm").unwrap();
        assert_eq!(named.disk.to_string(), "vm");
        let node = named.node(7, PushId([1; 16])).to_string();
        assert_eq!(
            Named::parse(&format!("json:{node}"))
                .unwrap()
                .disk
                .to_string(),
            "vm@7"
        );
        assert!(Named::parse("json:{\"path\":\"/r\",\"nonsense\":1}").is_err());
        assert!(Named::parse("json:{\"path\":\"/r\",\"url\":\"s3://b/r\"}").is_err());
    }
}

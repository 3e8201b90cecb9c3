//! Disks in repositories by name: `LOCATION[:TAG[@NUMBER]]`, where LOCATION is a folder, or a place in an object store
//! (`s3://BUCKET/PREFIX`); or `json:{...}` with the options of the node `repository`, which are those of the store beside
//! `path` or `url`, `tag` and `number`.

use std::path::Path;

use vellum::Result;
use vellum_repository::{DiskName, TagName};

use crate::invalid;
use crate::options::{Options, Scalar};
use crate::url_name;

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
pub fn name_of(options: &Options) -> (Option<String>, Vec<(String, serde_json::Value)>) {
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
}

//! Disks in repositories as options and users name them.

use std::path::PathBuf;
use std::sync::Arc;

use vellum::{Error, ErrorKind, Result};
use vellum_options::repository_name::{self, DRIVER};
use vellum_options::{Options, Scalar};
use vellum_repository::{
    DiskName, FolderObjects, Objects, PushId, Repository, TagName, check_folder,
};

use crate::node::errors::{invalid, refuse_unknown};

#[cfg(feature = "s3")]
use super::bucket;

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
        .filter(|scheme| vellum_options::url_name::is_store(scheme));
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
        let mut options = repository_name::options(name)?;
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
    use super::*;

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

//! Targets that are made here and sent away whole: objects of object stores.
//!
//! An object cannot be changed in place, so a new image is made in a file without a name, which
//! becomes the object when it is complete.

#[cfg(feature = "s3")]
use std::fs::File;
#[cfg(feature = "s3")]
use std::os::fd::AsRawFd;

use vellum::{Error, Result};
use vellum_options::{Options, filename, url_name};

/// An object that is to be made.
#[derive(Debug)]
pub struct UploadTarget {
    #[cfg(feature = "s3")]
    object: vellum_remote::ObjectOptions,
    #[cfg(feature = "s3")]
    file: File,
    path: String,
}

/// The object that a target's name means, by its URL or as `json:{"driver": "s3", ...}`; `None` if
/// it means something else.
///
/// # Errors
/// If it means an object and its options are wrong, or there is no place for a temporary file.
pub fn target(name: &str) -> Result<Option<UploadTarget>> {
    let Some(protocol) = filename::protocol(name) else {
        return Ok(None);
    };
    let options = match protocol {
        // Whoever takes the name for something else says what is wrong with it.
        "json" => Options::from_json(&name["json:".len()..]).ok(),
        protocol if url_name::is_store(protocol) => Some(url_name::options(name, protocol)),
        _ => None,
    };
    let Some(mut options) = options else {
        return Ok(None);
    };
    match options.get_text("driver").map(str::to_owned) {
        Some(driver) if url_name::is_store(&driver) => {
            options.take_text("driver")?;
            made(&driver, &mut options).map(Some)
        }
        _ => Ok(None),
    }
}

#[cfg(feature = "s3")]
fn made(driver: &str, options: &mut Options) -> Result<UploadTarget> {
    let object = vellum_graph::drivers::object_options(driver, options)?;
    vellum_graph::node::errors::refuse_unknown(options, driver)?;
    let file = tempfile::tempfile().map_err(|error| {
        let folder = std::env::temp_dir();
        let why = vellum_io::error::io_text(&error);
        let message = format!(
            "cannot make a temporary file in '{}': {why}",
            folder.display()
        );
        Error::new(vellum::ErrorKind::Io, "create", message).target(object.url.clone())
    })?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(UploadTarget { object, file, path })
}

#[cfg(not(feature = "s3"))]
fn made(driver: &str, _options: &mut Options) -> Result<UploadTarget> {
    let message = format!("The protocol '{driver}' requires a build with the feature 's3'");
    Err(Error::new(
        vellum::ErrorKind::Unsupported,
        "create",
        message,
    ))
}

impl UploadTarget {
    /// The name of the file in which the image is to be made.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Makes the object of what is in the file; `progress` is told how many bytes of how many are
    /// there. On a lane.
    ///
    /// # Errors
    /// What the store says. What was there before stays then.
    #[cfg(feature = "s3")]
    pub async fn send(self, progress: impl Fn(u64, u64) + Send + Sync + 'static) -> Result<()> {
        let read = |error: &std::io::Error| Error::from_io("read", error).target(self.path());
        let file = self.file.try_clone().map_err(|error| read(&error))?;
        let total = file.metadata().map_err(|error| read(&error))?.len();
        let upload = vellum_remote::Upload {
            to: self.object,
            progress: Box::new(move |done| progress(done, total)),
        };
        vellum_remote::upload(file, upload).await
    }

    /// There is none to be sent.
    ///
    /// # Errors
    /// Always.
    #[cfg(not(feature = "s3"))]
    pub async fn send(self, _progress: impl Fn(u64, u64) + Send + Sync + 'static) -> Result<()> {
        Err(Error::new(
            vellum::ErrorKind::Unsupported,
            "write",
            "a build without the feature 's3'",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_objects_are_told_from_others() {
        for name in [
            "disk",
            "file:disk",
            "json:{\"driver\":\"file\",\"filename\":\"x\"}",
        ] {
            assert!(target(name).unwrap().is_none(), "{name}");
        }
        assert!(target("s3://bucket").is_err());
        assert!(target("json:{\"driver\":\"s3\"}").is_err());
    }
}

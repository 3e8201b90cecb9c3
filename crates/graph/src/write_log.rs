//! The write log of a qcow2 image, as users ask for it: `journal` and `journal-size`, options of
//! our own.
//!
//! Invariants:
//! - The file is locked as an image is, so no two programs use one log.
//! - The name that the image gets leads to the file from anywhere: it is absolute, or that of a
//!   file in the folder in which the image really lies ([`resolve`]).

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum::qcow2::WriteLogOptions;
use vellum::{Error, ErrorKind, Result, Storage};
use vellum_options::{OpenFlags, Options, Scalar, filename};
use vellum_storage::AsFile;

use crate::node::file_node::{self, FileUse};

/// What the name of an image is made longer by for that of a log beside it.
const SUFFIX: &str = ".vlog";

/// Where a file that belongs to an image lies, as an option says: `on`, `off` or a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// Beside the image.
    Beside,
    Path(String),
}

impl Place {
    /// What an option says; `None`: `off`.
    pub(crate) fn parse(key: &str, value: Scalar) -> Result<Option<Place>> {
        match value {
            Scalar::Bool(false) => Ok(None),
            Scalar::Bool(true) => Ok(Some(Place::Beside)),
            Scalar::Text(text) => match text.as_str() {
                "off" => Ok(None),
                "on" => Ok(Some(Place::Beside)),
                "" => Err(invalid(format!(
                    "Parameter '{key}' expects 'on', 'off' or a path"
                ))),
                _ => Ok(Some(Place::Path(filename::local_path(&text)?))),
            },
            _ => Err(invalid(format!(
                "Invalid parameter type for '{key}', expected: string or boolean"
            ))),
        }
    }

    /// The file's path. `key`: the option; `suffix`: what the name of an image is made longer by.
    pub(crate) fn path(&self, image: &Arc<dyn Storage>, key: &str, suffix: &str) -> Result<String> {
        match self {
            Place::Beside => beside(image, key, suffix),
            Place::Path(path) => Ok(path.clone()),
        }
    }
}

/// A log that the user asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Journal {
    /// `None`: in the image.
    place: Option<Place>,
    len_bytes: Option<u64>,
}

/// What the option says for a log in the image.
const INSIDE: &str = "inside";

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

/// Takes the options of the log out of those of a node.
pub(crate) fn take(options: &mut Options) -> Result<Option<Journal>> {
    let len_bytes = options.take_size("journal-size")?;
    let place = match options.take("journal") {
        None if len_bytes.is_some() => {
            return Err(invalid("'journal-size' needs 'journal'"));
        }
        None => return Ok(None),
        Some(Scalar::Text(text)) if text == INSIDE => Some(None),
        Some(value) => Place::parse("journal", value)?.map(Some),
    };
    Ok(place.map(|place| Journal { place, len_bytes }))
}

/// A file that is removed again unless it is [kept](OpenedFile::keep), if it was made here.
#[derive(Debug)]
pub(crate) struct OpenedFile {
    made: Option<PathBuf>,
    only_while_empty: bool,
}

impl OpenedFile {
    /// Removed only while nothing is in it: else an image may need it.
    pub(crate) fn only_while_empty(mut self) -> Self {
        self.only_while_empty = true;
        self
    }

    /// It is in use, and stays.
    pub(crate) fn keep(mut self) {
        self.made = None;
    }
}

impl Drop for OpenedFile {
    fn drop(&mut self) {
        let Some(path) = &self.made else {
            return;
        };
        let is_empty = || fs::metadata(path).is_ok_and(|found| found.len() == 0);
        if !self.only_while_empty || is_empty() {
            // No image needs what is in it; a file that stays does no harm.
            let _ = fs::remove_file(path);
        }
    }
}

impl Journal {
    /// Opens the log of an image that is opened for writing, and makes its file if it has one that is
    /// missing.
    pub(crate) async fn open(
        &self,
        image: &Arc<dyn Storage>,
        flags: &OpenFlags,
    ) -> Result<(WriteLogOptions, Option<OpenedFile>)> {
        let (mut options, opened) = match &self.place {
            None => (WriteLogOptions::inside(), None),
            Some(place) => {
                let path = place.path(image, "journal", SUFFIX)?;
                let message = format!("Could not open the write log '{path}'");
                let opened = open_or_make(image, &path, flags).await;
                let (storage, name, opened) =
                    opened.map_err(|error| error.context("open", message))?;
                (WriteLogOptions::new(storage, name), Some(opened))
            }
        };
        if let Some(len_bytes) = self.len_bytes {
            options = options.len_bytes(len_bytes);
        }
        Ok((options, opened))
    }

    /// Opens the log of an image that is only read; `None` if that is where the image says.
    pub(crate) async fn open_to_read(&self, flags: &OpenFlags) -> Result<Option<WriteLogOptions>> {
        let Some(Place::Path(path)) = &self.place else {
            return Ok(None);
        };
        if !Path::new(path).exists() {
            return Ok(None);
        }
        let flags = OpenFlags {
            writable: false,
            ..flags.clone()
        };
        let opened = open_file(path, &flags).await;
        let storage = opened.map_err(|error| {
            error.context("open", format!("Could not open the write log '{path}'"))
        })?;
        Ok(Some(WriteLogOptions::new(storage, path)))
    }
}

/// Opens a file that belongs to an image that is opened for writing, and makes it if it is missing;
/// what the image calls it.
pub(crate) async fn open_or_make(
    image: &Arc<dyn Storage>,
    path: &str,
    flags: &OpenFlags,
) -> Result<(Arc<dyn Storage>, String, OpenedFile)> {
    let made = make(Path::new(path))?;
    let opened = OpenedFile {
        made: made.then(|| PathBuf::from(path)),
        only_while_empty: false,
    };
    let storage = open_file(path, flags).await?;
    let name = name_for(image.name(), Path::new(path))?;
    Ok((storage, name, opened))
}

/// The path of a file beside an image in a local file.
fn beside(image: &Arc<dyn Storage>, key: &str, suffix: &str) -> Result<String> {
    let file = image.as_file().filter(|file| !file.is_device());
    let real = file.and_then(|file| real_path(file.name()));
    let text = real.as_deref().and_then(Path::to_str);
    match text {
        Some(text) => Ok(format!("{text}{suffix}")),
        None => Err(invalid(format!(
            "{key}=on needs an image in a local file, and '{}' is none; name the file with \
             {key}=PATH",
            image.name()
        ))),
    }
}

/// Makes an empty file if there is none; whether it did.
fn make(path: &Path) -> Result<bool> {
    match fs::File::create_new(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(Error::from_io("open", &error)),
    }
}

fn could_not_open(path: &str, error: &std::io::Error) -> Error {
    Error::from_io("open", error).context("open", format!("Could not open '{path}'"))
}

/// Opens a file that belongs to an image with its locks, for writing if `flags` say so.
pub(crate) async fn open_file(path: &str, flags: &OpenFlags) -> Result<Arc<dyn Storage>> {
    // To open a pipe would wait for its other end, and the name may be a stranger's.
    let kind = fs::metadata(path).map_err(|error| could_not_open(path, &error))?;
    if !kind.is_file() && !kind.file_type().is_block_device() {
        return Err(invalid(format!(
            "'{path}' is neither a regular file nor a block device"
        )));
    }
    let mut options = Options::new();
    options.set_text("filename", path);
    let file = file_node::open_unlocked(options, flags, &[])?;
    Ok(file.lock(flags, FileUse::Format).await?)
}

/// What an image calls its file at `path`.
fn name_for(image: &str, path: &Path) -> Result<String> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let folder = fs::canonicalize(folder).map_err(|error| Error::from_io("open", &error))?;
    // Where the path ends with a link that stays: it may be what tells one disk from others.
    let name = path.file_name().and_then(OsStr::to_str);
    let name = name.ok_or_else(|| invalid("this is not the name of a file"))?;
    let image = real_path(image);
    let is_beside = image.is_some_and(|image| image.parent() == Some(&*folder));
    if is_beside && filename::protocol(name).is_none() {
        return Ok(name.to_owned());
    }
    let absolute = folder.join(name);
    let absolute = absolute.to_str().map(str::to_owned);
    absolute.ok_or_else(|| invalid("the path is not UTF-8, and an image cannot hold it"))
}

/// The path of the file that `image` calls `name`: one without a folder lies where the image
/// really lies, by whatever link it was found.
pub(crate) fn resolve(image: &str, name: &str) -> Result<String> {
    let real = real_path(image).and_then(|path| path.to_str().map(str::to_owned));
    let full = filename::resolve(real.as_deref().unwrap_or(image), name)?;
    filename::local_path(&full)
}

fn real_path(image: &str) -> Option<PathBuf> {
    fs::canonicalize(filename::local_path(image).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(text: &str) -> std::result::Result<Option<Journal>, String> {
        let mut options = Options::parse(text).unwrap();
        take(&mut options).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn options_say_where_the_log_lies() {
        let journal = |place, len_bytes| Ok(Some(Journal { place, len_bytes }));
        assert_eq!(taken(""), Ok(None));
        assert_eq!(taken("journal=off,journal-size=1M"), Ok(None));
        assert_eq!(taken("journal=on"), journal(Some(Place::Beside), None));
        assert_eq!(
            taken("journal=inside,journal-size=1M"),
            journal(None, Some(1 << 20))
        );
        let path = |path: &str| Some(Place::Path(path.to_owned()));
        assert_eq!(taken("journal=./inside"), journal(path("./inside"), None));
        assert_eq!(
            taken("journal=a,journal-size=1M"),
            journal(path("a"), Some(1 << 20))
        );
        assert_eq!(taken("journal=./on"), journal(path("./on"), None));
        for (text, message) in [
            ("journal-size=1M", "'journal-size' needs 'journal'"),
            (
                "journal=",
                "Parameter 'journal' expects 'on', 'off' or a path",
            ),
            ("journal=foo:bar", "Unknown protocol 'foo'"),
        ] {
            assert_eq!(taken(text).unwrap_err(), message);
        }
        let mut json = Options::from_json(r#"{"journal": true}"#).unwrap();
        assert_eq!(take(&mut json).unwrap().unwrap().place, Some(Place::Beside));
    }

    #[test]
    fn the_name_in_the_image_leads_to_the_log() {
        let directory = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(directory.path()).unwrap();
        for folder in ["a", "b"] {
            fs::create_dir(root.join(folder)).unwrap();
        }
        for file in ["a/image", "a/log", "a/x:y", "b/log"] {
            fs::write(root.join(file), b"").unwrap();
        }
        std::os::unix::fs::symlink(root.join("a/image"), root.join("b/link")).unwrap();
        let at = |path: &str| root.join(path).to_str().unwrap().to_owned();
        for (image, log, name) in [
            ("a/image", "a/log", "log".to_owned()),
            ("a/image", "b/../a/log", "log".to_owned()),
            ("a/image", "b/log", at("b/log")),
            // What looks like a protocol is none behind a slash.
            ("a/image", "a/x:y", at("a/x:y")),
            ("b/link", "a/log", "log".to_owned()),
            ("b/link", "b/log", at("b/log")),
        ] {
            let stored = name_for(&at(image), Path::new(&at(log))).unwrap();
            assert_eq!(stored, name, "{image} {log}");
            for image in ["a/image", "b/link"] {
                let found = resolve(&at(image), &stored).unwrap();
                let found = fs::canonicalize(found).unwrap();
                assert_eq!(found, fs::canonicalize(at(log)).unwrap(), "{image} {log}");
            }
        }
        let remote = name_for("nbd://localhost", Path::new(&at("a/log"))).unwrap();
        assert_eq!(remote, at("a/log"));
        assert!(resolve(&at("a/image"), "nbd://host/export").is_err());
    }
}

//! [`ImageSpec`]: which image a user means.

use vellum::{Error, ErrorKind, Result};

use crate::filename;
use crate::invalid;
use crate::options::Options;

/// Drivers that stand where QEMU wants a protocol, and on no file of their own: protocols and filters.
pub const PROTOCOLS: &[&str] = &[
    "az",
    "blkdebug",
    "blklogwrites",
    "blkverify",
    "cache",
    "compress",
    "copy-before-write",
    "copy-on-read",
    "file",
    "gs",
    "host_cdrom",
    "host_device",
    "http",
    "https",
    "nbd",
    "null-aio",
    "null-co",
    "ova",
    "preallocate",
    "quorum",
    "rbd",
    "repository",
    "s3",
    "snapshot-access",
    "ssh",
    "throttle",
];

/// Whether a driver is one of [`PROTOCOLS`].
pub fn is_protocol(driver: &str) -> bool {
    PROTOCOLS.contains(&driver)
}

/// How an image is named.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// A file name, perhaps with a protocol prefix, or `json:{...}`.
    Filename(String),
    /// Driver options, as `--image-opts` gives them.
    Options(Options),
}

/// An image as the user names it.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageSpec {
    /// The name or the options.
    pub source: Source,
    /// The format that the user demands (`-f`); without one it is probed.
    pub format: Option<String>,
    /// Options beyond the name, as `key=value` texts would give them.
    pub added: Options,
    /// The name for messages: what the user wrote.
    pub name: String,
}

impl ImageSpec {
    /// An image by file name.
    pub fn filename(name: impl Into<String>) -> Self {
        let name = name.into();
        ImageSpec {
            source: Source::Filename(name.clone()),
            format: None,
            added: Options::new(),
            name,
        }
    }

    /// An image by `key=value,...` (`--image-opts`).
    ///
    /// # Errors
    /// As [`Options::parse`].
    pub fn image_opts(text: &str) -> Result<Self> {
        let options = Options::parse_with_implied(text, Some("file"))?;
        Ok(ImageSpec {
            source: Source::Options(options),
            format: None,
            added: Options::new(),
            name: text.to_owned(),
        })
    }

    /// An image by file name, or by options where `image_opts` says so.
    ///
    /// # Errors
    /// As [`Options::parse`]; [`ErrorKind::InvalidArgument`] for a format beside `image_opts`.
    pub fn from_argument(text: &str, image_opts: bool, format: Option<&str>) -> Result<Self> {
        match image_opts {
            true if format.is_some() => Err(Error::new(
                ErrorKind::InvalidArgument,
                "parse options",
                "--image-opts and --format are mutually exclusive",
            )),
            true => ImageSpec::image_opts(text),
            false => Ok(ImageSpec::filename(text).with_format(format)),
        }
    }

    /// The options of the node that the user means: a name turned into options.
    ///
    /// # Errors
    /// For a name that has no meaning here.
    pub fn options(&self) -> Result<Options> {
        let mut options = match &self.source {
            Source::Options(options) => options.clone(),
            Source::Filename(name) => match name.strip_prefix("json:") {
                Some(json) => json_name(json)?,
                None => {
                    let node = filename::node_options(name)?;
                    match self.format.as_deref().is_some_and(is_protocol) {
                        true => node,
                        false => {
                            let mut options = Options::new();
                            options.set_group("file", node);
                            options
                        }
                    }
                }
            },
        };
        for (key, value) in self.added.iter() {
            options.set(key, value.clone());
        }
        if let Some(format) = &self.format {
            options.set_text("driver", format.as_str());
        }
        Ok(options)
    }

    /// Adds options.
    #[must_use]
    pub fn with_options(mut self, added: Options) -> Self {
        self.added = added;
        self
    }

    /// Demands a format.
    #[must_use]
    pub fn with_format(mut self, format: Option<&str>) -> Self {
        self.format = format.map(str::to_owned);
        self
    }
}

/// The options of a `json:` name.
fn json_name(json: &str) -> Result<Options> {
    Options::from_json(json).map_err(|error| match error.message() {
        unparsed if unparsed.contains("JSON value") || unparsed.contains("JSON parse") => {
            invalid(format!("Could not parse the JSON options: {unparsed}"))
        }
        _ => error,
    })
}

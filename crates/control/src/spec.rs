//! [`ImageSpec`]: which image a user means.

use vellum::{Error, ErrorKind, Result};

use crate::Options;

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
        crate::open::node_options(self)
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

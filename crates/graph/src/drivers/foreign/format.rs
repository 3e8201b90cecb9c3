//! [`ForeignFormat`]: a format of other programs, as the rest of this crate knows it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use vellum::{BlockDevice, Error, ErrorKind, Result, Storage};
use vellum_foreign::{CheckReport, Fix};
use vellum_options::Options;
use vellum_options::create_options::{CreateSettings, OptionDescription};

use crate::node::file_policy::FilePolicy;
use crate::open::context::OpenContext;

/// What opens, makes or checks an image.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + 'a>>;

/// A format, as the rest of this crate knows it.
pub struct ForeignFormat {
    /// Its name, as `-f` has it.
    pub name: &'static str,
    /// Opens an image of it.
    pub open: fn(Opening) -> Pending<'static, Arc<dyn BlockDevice>>,
    /// What makes images of it; `None` for those that are only read.
    pub create: Option<Creation>,
    /// Looks at an image that nobody else changes.
    pub(crate) check: Option<Check>,
    /// Whether a check can mend what it finds.
    pub(crate) repairs: bool,
    /// Lists of options of a node, beside its file and its backing file.
    pub(crate) options: &'static [&'static [&'static str]],
    /// Whether clusters may be written compressed, in images of some kind.
    pub(crate) compresses: bool,
    /// Whether images have backing files.
    pub(crate) has_backing: bool,
}

/// A check, which may mend what it finds.
pub(crate) type Check =
    for<'a> fn(&'a Arc<dyn Storage>, Fix, &'a FilePolicy) -> Pending<'a, CheckReport>;

/// How images of a format are made.
pub struct Creation {
    /// The options of a new image.
    pub options: &'static [OptionDescription],
    /// Checks settings before anything is touched.
    pub validate: fn(&CreateSettings) -> Result<()>,
    /// Names of the files that an image of this name has beside the one that is called so.
    pub extents: fn(&CreateSettings, &str) -> Result<Vec<String>>,
    /// Makes an image in files that are empty.
    pub fill: for<'a> fn(New<'a>) -> Pending<'a, ()>,
    /// Options of `blockdev-create` and the settings that they are.
    pub qmp: &'static [QmpOption],
}

/// An image that is being made.
#[derive(Clone, Copy)]
pub struct New<'a> {
    /// The empty file that becomes the image.
    pub file: &'a Arc<dyn Storage>,
    /// The files of [`Creation::extents`].
    pub extents: &'a [Arc<dyn Storage>],
    /// The options of the new image, `size` among them.
    pub settings: &'a CreateSettings,
    /// How files that the options name are opened.
    pub around: &'a OpenContext,
    /// Sizes that the format cannot have are refused, not rounded: `blockdev-create` wants that.
    pub exact: bool,
}

impl New<'_> {
    pub(crate) fn size_bytes(&self) -> u64 {
        self.settings.integer("size").unwrap_or(0)
    }
}

/// An option of `blockdev-create`.
pub struct QmpOption {
    /// Its name in QMP.
    pub key: &'static str,
    /// The option of `create -o` that it sets.
    pub setting: &'static str,
    /// What values it has.
    pub kind: QmpKind,
}

/// What values an option of `blockdev-create` has.
pub enum QmpKind {
    /// Any text.
    Text,
    /// A boolean.
    Switch,
    /// A number of bytes.
    Size,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// The method's name, and what that needs beside in other settings of `encrypt.`.
    Encryption,
}

pub(crate) const fn qmp(key: &'static str, setting: &'static str, kind: QmpKind) -> QmpOption {
    QmpOption { key, setting, kind }
}

/// For formats whose images are one file.
pub(crate) fn no_extents(_: &CreateSettings, _: &str) -> Result<Vec<String>> {
    Ok(Vec::new())
}

/// That a setting has a value that it cannot have.
pub(crate) fn not_accepted(name: &str, value: &str) -> Error {
    let message = format!("Parameter '{name}' does not accept value '{value}'");
    Error::new(ErrorKind::InvalidArgument, "create", message)
}

impl std::fmt::Debug for Creation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Creation")
    }
}

impl std::fmt::Debug for ForeignFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ForeignFormat({})", self.name)
    }
}

impl PartialEq for ForeignFormat {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for ForeignFormat {}

/// An image of a foreign format on its way.
pub struct Opening {
    /// The format that it is taken for.
    pub format: &'static ForeignFormat,
    /// The file that holds it.
    pub file: Arc<dyn Storage>,
    /// What is left of the node's options.
    pub options: Options,
    /// Writes to it are allowed.
    pub writable: bool,
    /// How it is opened, and where.
    pub around: OpenContext,
}

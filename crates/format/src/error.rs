//! What is wrong with an image's bytes.

use alloc::borrow::Cow;
use alloc::boxed::Box;
use core::fmt;

/// Result of decoding or encoding.
pub type Result<T, E = FormatError> = core::result::Result<T, E>;

/// The kind of fault, stable for programs to match on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FormatErrorKind {
    /// The bytes are no qcow2 image.
    NotQcow2,
    /// A version, feature or method that this crate does not know.
    Unsupported,
    /// A value outside what the format or [`crate::limits`] allow.
    Invalid,
    /// A size or count beyond [`crate::limits`].
    TooLarge,
    /// The structure goes on beyond the bytes at hand.
    Truncated,
    /// A table entry that no correct program writes.
    Corrupt,
    /// What is to be encoded does not fit its place.
    NoSpace,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Inner {
    kind: FormatErrorKind,
    structure: &'static str,
    field: &'static str,
    value: u64,
    message: Cow<'static, str>,
}

/// A fault in an on-disk structure: which structure, which field, what value.
///
/// [`Display`](fmt::Display) prints QEMU's words where QEMU has some, since that
/// is what users and scripts see; `{:#}` puts structure, field and value before
/// them. The fault is boxed to keep hot results small.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FormatError(Box<Inner>);

impl FormatError {
    pub(crate) fn new(
        kind: FormatErrorKind,
        structure: &'static str,
        field: &'static str,
        value: u64,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        FormatError(Box::new(Inner {
            kind,
            structure,
            field,
            value,
            message: message.into(),
        }))
    }

    /// Adds what can be done about it, on a line of its own.
    pub(crate) fn with_hint(mut self, hint: impl fmt::Display) -> Self {
        self.0.message = alloc::format!("{}\n{hint}", self.0.message).into();
        self
    }

    /// The kind of fault.
    pub fn kind(&self) -> FormatErrorKind {
        self.0.kind
    }

    /// The structure that is at fault, for example `header` or `L2 entry`.
    pub fn structure(&self) -> &'static str {
        self.0.structure
    }

    /// The field that is at fault, named as in `docs/FORMAT.md`.
    pub fn field(&self) -> &'static str {
        self.0.field
    }

    /// The value found in the field (its length, for fields that are strings).
    pub fn value(&self) -> u64 {
        self.0.value
    }

    /// What is wrong, without structure and field.
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() {
            let Inner {
                structure,
                field,
                value,
                ..
            } = &*self.0;
            write!(f, "{structure}: {field} = {value:#x}: ")?;
        }
        f.write_str(&self.0.message)
    }
}

impl core::error::Error for FormatError {}

//! The options of `create -o`: which there are, their types, and their texts.

use std::collections::BTreeMap;
use std::fmt::Write;

use vellum::{Error, ErrorKind, Result};

use crate::foreign;
use crate::options::{Options, Scalar, words};

/// The type of a creation option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionType {
    /// Any text.
    Text,
    /// `on` or `off`.
    Bool,
    /// A number.
    Number,
    /// A number of bytes with an optional suffix.
    Size,
}

/// One creation option of a format.
#[derive(Debug, Clone, Copy)]
pub struct OptionDescription {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: OptionType,
    /// What it does, in the words that `-o help` prints.
    pub help: &'static str,
    /// The value that stands where none is given, if it is always shown.
    pub default: Option<&'static str>,
}

pub(crate) const fn option(
    name: &'static str,
    kind: OptionType,
    help: &'static str,
    default: Option<&'static str>,
) -> OptionDescription {
    OptionDescription {
        name,
        kind,
        help,
        default,
    }
}

use OptionType::{Bool, Number, Size, Text};

pub(crate) const SIZE: OptionDescription = option("size", Size, "Virtual disk size", None);
const PREALLOCATION_QCOW2: &str =
    "Preallocation mode (allowed values: off, metadata, falloc, full)";
const PREALLOCATION_FILE: &str = "Preallocation mode (allowed values: off, falloc, full)";

// What encryption takes, as luks names it.
const CIPHER_ALG: OptionDescription = option(
    "cipher-alg",
    Text,
    "Name of encryption cipher algorithm",
    None,
);
const CIPHER_MODE: OptionDescription =
    option("cipher-mode", Text, "Name of encryption cipher mode", None);
const IVGEN_ALG: OptionDescription =
    option("ivgen-alg", Text, "Name of IV generator algorithm", None);
const IVGEN_HASH_ALG: OptionDescription = option(
    "ivgen-hash-alg",
    Text,
    "Name of IV generator hash algorithm",
    None,
);
const HASH_ALG: OptionDescription =
    option("hash-alg", Text, "Name of encryption hash algorithm", None);
const ITER_TIME: OptionDescription = option(
    "iter-time",
    Number,
    "Time to spend in PBKDF in milliseconds",
    None,
);
const STATE: OptionDescription = option(
    "state",
    Text,
    "Select new state of affected keyslots (active/inactive)",
    None,
);
const KEYSLOT: OptionDescription = option(
    "keyslot",
    Number,
    "Select a single keyslot to modify explicitly",
    None,
);
const OLD_SECRET: OptionDescription = option(
    "old-secret",
    Text,
    "Select all keyslots that match this password",
    None,
);
const NEW_SECRET: OptionDescription = option(
    "new-secret",
    Text,
    "New secret to set in the matching keyslots. Empty string to erase",
    None,
);

/// The same option under the name that qcow2 has for it.
const fn renamed(name: &'static str, option: OptionDescription) -> OptionDescription {
    OptionDescription { name, ..option }
}

// Options of qcow2 that are for new images and for `amend`.
const COMPAT: OptionDescription = option(
    "compat",
    Text,
    "Compatibility level (v2 [0.10] or v3 [1.1])",
    None,
);
pub(crate) const BACKING_FILE: OptionDescription =
    option("backing_file", Text, "File name of a base image", None);
pub(crate) const BACKING_FORMAT: OptionDescription =
    option("backing_fmt", Text, "Image format of the base image", None);
const DATA_FILE: OptionDescription = option(
    "data_file",
    Text,
    "File name of an external data file",
    None,
);
const DATA_FILE_RAW: OptionDescription = option(
    "data_file_raw",
    Bool,
    "The external data file must stay valid as a raw image",
    None,
);

/// Options of qcow2, in the order in which they are shown.
const QCOW2: &[OptionDescription] = &[
    option(
        "encryption",
        Bool,
        "Encrypt the image with format 'aes'. (Deprecated in favor of encrypt.format=aes)",
        None,
    ),
    option(
        "encrypt.format",
        Text,
        "Encrypt the image, format choices: 'aes', 'luks'",
        None,
    ),
    option(
        "encrypt.key-secret",
        Text,
        "ID of secret providing qcow AES key or LUKS passphrase",
        None,
    ),
    renamed("encrypt.cipher-alg", CIPHER_ALG),
    renamed("encrypt.cipher-mode", CIPHER_MODE),
    renamed("encrypt.ivgen-alg", IVGEN_ALG),
    renamed("encrypt.ivgen-hash-alg", IVGEN_HASH_ALG),
    renamed("encrypt.hash-alg", HASH_ALG),
    renamed("encrypt.iter-time", ITER_TIME),
    option("cluster_size", Size, "qcow2 cluster size", Some("65536")),
    option("extended_l2", Bool, "Extended L2 tables", Some("off")),
    option("preallocation", Text, PREALLOCATION_QCOW2, None),
    option(
        "compression_type",
        Text,
        "Compression method used for image cluster compression",
        Some("zlib"),
    ),
    SIZE,
    COMPAT,
    BACKING_FILE,
    BACKING_FORMAT,
    DATA_FILE,
    DATA_FILE_RAW,
    option(
        "lazy_refcounts",
        Bool,
        "Postpone refcount updates",
        Some("off"),
    ),
    option(
        "refcount_bits",
        Number,
        "Width of a reference count entry in bits",
        Some("16"),
    ),
];

/// What `amend` can change of a luks volume, in QEMU's order.
const LUKS_AMEND: &[OptionDescription] = &[STATE, KEYSLOT, OLD_SECRET, NEW_SECRET, ITER_TIME];

/// What `amend` can change of a qcow2 image, in QEMU's order.
const QCOW2_AMEND: &[OptionDescription] = &[
    renamed("encrypt.state", STATE),
    renamed("encrypt.keyslot", KEYSLOT),
    renamed("encrypt.old-secret", OLD_SECRET),
    renamed("encrypt.new-secret", NEW_SECRET),
    renamed("encrypt.iter-time", ITER_TIME),
    SIZE,
    COMPAT,
    BACKING_FILE,
    BACKING_FORMAT,
    DATA_FILE,
    DATA_FILE_RAW,
    option("lazy_refcounts", Bool, "Postpone refcount updates", None),
    option(
        "refcount_bits",
        Number,
        "Width of a reference count entry in bits",
        None,
    ),
];

const RAW: &[OptionDescription] = &[SIZE];

/// Options of luks, in the order in which they are shown.
const LUKS: &[OptionDescription] = &[
    SIZE,
    option(
        "key-secret",
        Text,
        "ID of the secret that provides the keyslot passphrase",
        None,
    ),
    CIPHER_ALG,
    CIPHER_MODE,
    IVGEN_ALG,
    IVGEN_HASH_ALG,
    HASH_ALG,
    ITER_TIME,
    option(
        "detached-header",
        Bool,
        "Create a detached LUKS header",
        None,
    ),
];

/// Options of files, which every format on a file takes too.
const FILE: &[OptionDescription] = &[
    SIZE,
    option(
        "nocow",
        Bool,
        "Turn off copy-on-write (valid only on btrfs)",
        None,
    ),
    option("preallocation", Text, PREALLOCATION_FILE, None),
    option(
        "extent_size_hint",
        Size,
        "Extent size hint for the image file, 0 to disable",
        None,
    ),
];

/// What an image on Ceph takes beside.
pub(crate) const OBJECT_SIZE: OptionDescription =
    option("cluster_size", Size, "RBD object size", None);

/// Options of devices, which are there already.
const HOST_DEVICE: &[OptionDescription] = &[
    option(
        "preallocation",
        Text,
        "Preallocation mode (allowed values: off)",
        None,
    ),
    SIZE,
];

/// The options that a format takes by itself; `None` for formats that cannot be made.
pub fn format_options(format: &str) -> Option<&'static [OptionDescription]> {
    match format {
        "qcow2" => Some(QCOW2),
        "raw" => Some(RAW),
        "luks" => Some(LUKS),
        "file" => Some(FILE),
        "host_device" => Some(HOST_DEVICE),
        _ => Some(foreign::find(format)?.create.as_ref()?.options),
    }
}

/// The options that `amend` takes for images of a format; `None` if it takes none.
pub fn amend_options(format: &str) -> Option<&'static [OptionDescription]> {
    match format {
        "qcow2" => Some(QCOW2_AMEND),
        "luks" => Some(LUKS_AMEND),
        _ => None,
    }
}

/// Why images of a format cannot be made: QEMU knows some only to read.
pub fn not_creatable(format: &str) -> String {
    match format {
        "bochs" | "cloop" | "dmg" => {
            format!("Format driver '{format}' does not support image creation")
        }
        _ => format!("Unknown file format '{format}'"),
    }
}

/// The options of a format on a file: its own first, then what files add.
pub fn all_options(format: &str) -> Option<Vec<OptionDescription>> {
    let mut all = format_options(format)?.to_vec();
    let own = all.len();
    for extra in FILE {
        if !all[..own].iter().any(|option| option.name == extra.name) {
            all.push(*extra);
        }
    }
    Some(all)
}

/// The list that `-o help` prints.
pub fn help_text(options: &[OptionDescription]) -> String {
    let mut sorted = options.to_vec();
    sorted.sort_by_key(|option| option.name);
    let mut text = String::new();
    for option in sorted {
        let kind = match option.kind {
            Text => "str",
            Bool => "bool (on/off)",
            Number => "num",
            Size => "size",
        };
        let head = format!("  {}=<{kind}>", option.name);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{head:<24} - {}", option.help);
    }
    text
}

/// Whether `-o` texts ask for the list of options.
pub fn asks_for_help(text: &str) -> bool {
    words(text).iter().any(|word| word == "help" || word == "?")
}

/// Whether a text can be joined to others of its kind: it is not empty, begins
/// with no comma, and leaves none open at its end.
pub fn is_option_list(text: &str) -> bool {
    let open_at_end = text.chars().rev().take_while(|&c| c == ',').count() % 2 == 1;
    !text.is_empty() && !open_at_end && !text.starts_with(',')
}

/// A value that was given.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Given {
    Text(String),
    Bool(bool, String),
    Integer(u64),
}

/// Creation options with their values, checked against their types.
#[derive(Debug, Clone)]
pub struct CreateSettings {
    descriptions: Vec<OptionDescription>,
    given: BTreeMap<&'static str, Given>,
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, "parse options", message)
}

impl CreateSettings {
    /// Settings of a format on a file, all at their defaults; `None` for formats
    /// that cannot be made.
    pub fn new(format: &str) -> Option<Self> {
        all_options(format).map(Self::of)
    }

    /// Settings of these options, all at their defaults.
    pub fn of(descriptions: Vec<OptionDescription>) -> Self {
        CreateSettings {
            descriptions,
            given: BTreeMap::new(),
        }
    }

    /// Takes a `-o` text in.
    ///
    /// # Errors
    /// As [`CreateSettings::set`].
    pub fn parse(&mut self, text: &str) -> Result<()> {
        let options = Options::parse(text)?;
        for (key, value) in options.iter() {
            let Scalar::Text(value) = value else { continue };
            self.set(key, value)?;
        }
        Ok(())
    }

    /// Sets one option from its text.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for an option that the format does not have, and a value
    /// that does not fit its type.
    pub fn set(&mut self, name: &str, text: &str) -> Result<()> {
        let Some(description) = self.descriptions.iter().find(|known| known.name == name) else {
            return Err(invalid(format!("Invalid parameter '{name}'")));
        };
        let mut one = Options::new();
        one.set_text(name, text);
        let given = match description.kind {
            Text => Given::Text(text.to_owned()),
            Bool => Given::Bool(one.take_bool(name)?.unwrap_or(false), text.to_owned()),
            Size => Given::Integer(one.take_size(name)?.unwrap_or(0)),
            Number => Given::Integer(one.take_number(name)?.unwrap_or(0)),
        };
        self.given.insert(description.name, given);
        Ok(())
    }

    /// Whether the format has an option.
    pub fn knows(&self, name: &str) -> bool {
        self.descriptions.iter().any(|known| known.name == name)
    }

    /// Whether an option was given.
    pub fn is_given(&self, name: &str) -> bool {
        self.given.contains_key(name)
    }

    /// A text option: what was given, or its default.
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.given.get(name) {
            Some(Given::Text(text)) => Some(text),
            Some(_) => None,
            None => self.default(name),
        }
    }

    /// A boolean option.
    pub fn bool(&self, name: &str) -> bool {
        match self.given.get(name) {
            Some(Given::Bool(value, _)) => *value,
            _ => self.default(name) == Some("on"),
        }
    }

    /// A size or number.
    pub fn integer(&self, name: &str) -> Option<u64> {
        match self.given.get(name) {
            Some(Given::Integer(value)) => Some(*value),
            Some(_) => None,
            None => self.default(name).and_then(|text| text.parse().ok()),
        }
    }

    fn default(&self, name: &str) -> Option<&'static str> {
        self.descriptions
            .iter()
            .find(|known| known.name == name)
            .and_then(|known| known.default)
    }

    /// All values in their order, as the line `Formatting ...` shows them.
    pub fn summary(&self) -> String {
        let mut words = Vec::new();
        for description in &self.descriptions {
            let name = description.name;
            match (self.given.get(name), description.default) {
                (Some(Given::Text(text)), _) => {
                    words.push(format!("{name}={}", text.replace(',', ",,")));
                }
                (Some(Given::Bool(_, text)), _) => words.push(format!("{name}={text}")),
                (Some(Given::Integer(value)), _) => words.push(format!("{name}={}", *value as i64)),
                (None, Some(default)) => words.push(format!("{name}={default}")),
                (None, None) => {}
            }
        }
        words.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_is_qemus() {
        let mut settings = CreateSettings::new("qcow2").unwrap();
        settings
            .parse("lazy_refcounts=yes,backing_file=a,,b,nocow=on")
            .unwrap();
        settings.set("size", "1M").unwrap();
        assert_eq!(
            settings.summary(),
            "cluster_size=65536 extended_l2=off compression_type=zlib size=1048576 \
             backing_file=a,,b lazy_refcounts=yes refcount_bits=16 nocow=on"
        );
        assert!(settings.bool("lazy_refcounts"));
        assert_eq!(settings.integer("cluster_size"), Some(65536));
    }

    #[test]
    fn unknown_and_ill_typed_options_are_named() {
        let mut settings = CreateSettings::new("qcow2").unwrap();
        let message = |result: Result<()>| result.unwrap_err().message().to_owned();
        assert_eq!(message(settings.parse("foo=1")), "Invalid parameter 'foo'");
        assert_eq!(
            message(settings.parse("refcount_bits=x")),
            "Parameter 'refcount_bits' expects a number"
        );
        assert_eq!(
            message(settings.parse("extended_l2=2")),
            "Parameter 'extended_l2' expects 'on' or 'off'"
        );
        assert!(CreateSettings::new("bochs").is_none());
    }

    #[test]
    fn lists_with_open_commas_are_refused() {
        for good in ["a", "a,b", "a,,"] {
            assert!(is_option_list(good), "{good}");
        }
        for bad in ["", ",", ",,", "a,", ",a", "a,,,"] {
            assert!(!is_option_list(bad), "{bad}");
        }
    }

    #[test]
    fn help_is_sorted_and_aligned() {
        let text = help_text(format_options("raw").unwrap());
        assert_eq!(text, "  size=<size>            - Virtual disk size\n");
        assert!(asks_for_help("a=b,help") && asks_for_help("?") && !asks_for_help("helper=1"));
    }
}

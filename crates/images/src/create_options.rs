//! The options of `create -o` and `amend -o`: which each format has, and their texts.

use vellum_options::create_options::{
    BACKING_FILE, BACKING_FORMAT, CreateSettings, OptionDescription, OptionType, SIZE, option,
};

use vellum_graph::foreign;

use OptionType::{Bool, Number, Size, Text};

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
pub const OBJECT_SIZE: OptionDescription = option("cluster_size", Size, "RBD object size", None);

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

/// Settings of a format on a file, all at their defaults; `None` for formats that cannot be made.
pub fn settings(format: &str) -> Option<CreateSettings> {
    all_options(format).map(CreateSettings::of)
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

#[cfg(test)]
mod tests {
    use vellum::Result;
    use vellum_options::create_options::{asks_for_help, help_text};

    use super::*;

    #[test]
    fn the_summary_is_qemus() {
        let mut given = settings("qcow2").unwrap();
        given
            .parse("lazy_refcounts=yes,backing_file=a,,b,nocow=on")
            .unwrap();
        given.set("size", "1M").unwrap();
        assert_eq!(
            given.summary(),
            "cluster_size=65536 extended_l2=off compression_type=zlib size=1048576 \
             backing_file=a,,b lazy_refcounts=yes refcount_bits=16 nocow=on"
        );
        assert!(given.bool("lazy_refcounts"));
        assert_eq!(given.integer("cluster_size"), Some(65536));
    }

    #[test]
    fn unknown_and_ill_typed_options_are_named() {
        let mut given = settings("qcow2").unwrap();
        let message = |result: Result<()>| result.unwrap_err().message().to_owned();
        assert_eq!(message(given.parse("foo=1")), "Invalid parameter 'foo'");
        assert_eq!(
            message(given.parse("refcount_bits=x")),
            "Parameter 'refcount_bits' expects a number"
        );
        assert_eq!(
            message(given.parse("extended_l2=2")),
            "Parameter 'extended_l2' expects 'on' or 'off'"
        );
        assert!(settings("bochs").is_none());
    }

    #[test]
    fn help_is_sorted_and_aligned() {
        let text = help_text(format_options("raw").unwrap());
        assert_eq!(text, "  size=<size>            - Virtual disk size\n");
        assert!(asks_for_help("a=b,help") && asks_for_help("?") && !asks_for_help("helper=1"));
    }
}

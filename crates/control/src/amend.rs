//! What `amend -o` says, as options of the engine.

use vellum::qcow2::amend::AmendOptions;
use vellum::qcow2::amend::encryption::KeySlotChange;
use vellum::{Error, ErrorKind, Result};

use crate::create_options::{CreateSettings, OptionDescription, amend_options, format_options};

/// Drivers of QEMU that amend nothing, whether or not this version has them.
const QEMU_DRIVERS: &[&str] = &[
    "blkdebug",
    "blklogwrites",
    "blkverify",
    "bochs",
    "cloop",
    "compress",
    "copy-before-write",
    "copy-on-read",
    "dmg",
    "file",
    "ftp",
    "ftps",
    "gluster",
    "host_cdrom",
    "host_device",
    "http",
    "https",
    "iscsi",
    "iser",
    "nbd",
    "nfs",
    "null-aio",
    "null-co",
    "nvme",
    "parallels",
    "preallocate",
    "qcow",
    "qed",
    "quorum",
    "raw",
    "rbd",
    "replication",
    "snapshot-access",
    "ssh",
    "throttle",
    "vdi",
    "vhdx",
    "vmdk",
    "vpc",
    "vvfat",
];

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "amend", message)
}

/// The options that `amend` takes for a format.
///
/// # Errors
/// In QEMU's words, for formats that nothing of can be amended, and unknown ones.
pub fn options_of(format: &str) -> Result<&'static [OptionDescription]> {
    match amend_options(format) {
        Some(options) => Ok(options),
        None if QEMU_DRIVERS.contains(&format) => Err(invalid(format!(
            "Format driver '{format}' does not support option amendment"
        ))),
        None => Err(invalid(format!("Unknown file format '{format}'"))),
    }
}

/// Reads a `-o` text for an image of a format.
///
/// # Errors
/// In QEMU's words, for options that do not exist, that are only for new images, or
/// whose values have the wrong type.
pub fn parse(format: &str, text: &str) -> Result<AmendOptions> {
    let mut settings = CreateSettings::of(options_of(format)?.to_vec());
    settings.parse(text).map_err(|error| {
        if is_for_creation(format, text) {
            let hint = "This option is only supported for image creation";
            return invalid(format!("{}\n{hint}", error.message()));
        }
        error
    })?;
    amend_of(&settings)
}

/// Whether all options would do if creation options were taken too.
fn is_for_creation(format: &str, text: &str) -> bool {
    let creation = format_options(format).unwrap_or(&[]);
    let amendment = amend_options(format).unwrap_or(&[]);
    let all = [amendment, creation].concat();
    CreateSettings::of(all).parse(text).is_ok()
}

fn amend_of(settings: &CreateSettings) -> Result<AmendOptions> {
    let text = |name| settings.text(name).map(str::to_owned);
    let bool = |name| settings.is_given(name).then(|| settings.bool(name));
    let version = match settings.text("compat") {
        None => None,
        Some("0.10" | "v2") => Some(2),
        Some("1.1" | "v3") => Some(3),
        Some(other) => return Err(invalid(format!("Unknown compatibility level {other}"))),
    };
    Ok(AmendOptions {
        version,
        size_bytes: settings.integer("size").filter(|&bytes| bytes > 0),
        backing_file: text("backing_file"),
        backing_format: text("backing_fmt"),
        data_file: text("data_file"),
        data_file_raw: bool("data_file_raw"),
        lazy_refcounts: bool("lazy_refcounts"),
        refcount_bits: settings.integer("refcount_bits"),
        key_slots: key_slots(settings)?,
        force: false,
    })
}

fn key_slots(settings: &CreateSettings) -> Result<Option<KeySlotChange>> {
    let names = [
        "encrypt.state",
        "encrypt.new-secret",
        "encrypt.old-secret",
        "encrypt.keyslot",
        "encrypt.iter-time",
    ];
    if !names.iter().any(|name| settings.is_given(name)) {
        return Ok(None);
    }
    let text = |name| settings.text(name).map(str::to_owned);
    Ok(Some(KeySlotChange {
        active: match settings.text("encrypt.state") {
            None => None,
            Some("active") => Some(true),
            Some("inactive") => Some(false),
            Some(other) => {
                let message = format!("Parameter 'state' does not accept value '{other}'");
                return Err(invalid(message));
            }
        },
        new_secret: text("encrypt.new-secret"),
        old_secret: text("encrypt.old-secret"),
        key_slot: settings.integer("encrypt.keyslot"),
        iteration_time_ms: settings.integer("encrypt.iter-time"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        parse("qcow2", text).unwrap_err().message().to_owned()
    }

    #[test]
    fn only_what_is_given_changes() {
        let options = parse("qcow2", "size=0,lazy_refcounts").unwrap();
        let lazy = AmendOptions {
            lazy_refcounts: Some(true),
            ..AmendOptions::default()
        };
        assert_eq!(options, lazy);
        let options = parse("qcow2", "compat=v2,data_file=,refcount_bits=8,size=1k").unwrap();
        let all = AmendOptions {
            version: Some(2),
            data_file: Some(String::new()),
            refcount_bits: Some(8),
            size_bytes: Some(1024),
            ..AmendOptions::default()
        };
        assert_eq!(options, all);
    }

    #[test]
    fn options_of_new_images_are_told_from_unknown_ones() {
        let hint = "\nThis option is only supported for image creation";
        assert_eq!(
            refusal("cluster_size=1k"),
            format!("Invalid parameter 'cluster_size'{hint}")
        );
        assert_eq!(refusal("foo=1"), "Invalid parameter 'foo'");
        assert_eq!(
            refusal("cluster_size=1k,foo=1"),
            "Invalid parameter 'cluster_size'"
        );
        assert_eq!(refusal("compat="), "Unknown compatibility level ");
        assert_eq!(
            parse("raw", "size=1").unwrap_err().message(),
            "Format driver 'raw' does not support option amendment"
        );
    }
}

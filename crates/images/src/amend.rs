//! What `amend -o` says, as options of the engine.

use vellum::luks::KeyChange;
use vellum::qcow2::amend::AmendOptions;
use vellum::{Error, ErrorKind, Result};
use vellum_graph::probe::is_format_name;
use vellum_options::create_options::{CreateSettings, OptionDescription};

use crate::amend_keys;
use crate::create_options::{amend_options, format_options};

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
        None if is_format_name(format) => Err(invalid(format!(
            "Format driver '{format}' does not support option amendment"
        ))),
        None => Err(invalid(format!("Unknown file format '{format}'"))),
    }
}

/// Reads a `-o` text for a qcow2 image; `force` is the tool's `--force`. Options of key
/// slots are looked at only if `has_key_slots` says that there are some.
///
/// # Errors
/// In QEMU's words, for options that do not exist, that are only for new images, or
/// whose values have the wrong type.
pub fn parse(
    text: &str,
    force: bool,
    has_key_slots: impl FnOnce() -> Result<()>,
) -> Result<AmendOptions> {
    let settings = settings("qcow2", text)?;
    if amend_keys::is_asked_for(&settings, "encrypt.") {
        has_key_slots()?;
    }
    amend_of(&settings, force)
}

/// Reads a `-o` text for a volume of the luks format.
///
/// # Errors
/// As [`parse`].
pub fn parse_luks(text: &str, force: bool) -> Result<KeyChange> {
    amend_keys::key_change(&settings("luks", text)?, "", force)
}

fn settings(format: &str, text: &str) -> Result<CreateSettings> {
    let mut settings = CreateSettings::of(options_of(format)?.to_vec());
    settings.parse(text).map_err(|error| {
        if is_for_creation(format, text) {
            let hint = "This option is only supported for image creation";
            return invalid(format!("{}\n{hint}", error.message()));
        }
        error
    })?;
    Ok(settings)
}

/// Whether all options would do if creation options were taken too.
fn is_for_creation(format: &str, text: &str) -> bool {
    let creation = format_options(format).unwrap_or(&[]);
    let amendment = amend_options(format).unwrap_or(&[]);
    let all = [amendment, creation].concat();
    CreateSettings::of(all).parse(text).is_ok()
}

fn amend_of(settings: &CreateSettings, force: bool) -> Result<AmendOptions> {
    let text = |name| settings.text(name).map(str::to_owned);
    let bool = |name| settings.is_given(name).then(|| settings.bool(name));
    let version = match settings.text("compat") {
        None => None,
        Some("0.10" | "v2") => Some(2),
        Some("1.1" | "v3") => Some(3),
        Some(other) => return Err(invalid(format!("Unknown compatibility level {other}"))),
    };
    Ok(AmendOptions::default()
        .version(version)
        .size_bytes(settings.integer("size").filter(|&bytes| bytes > 0))
        .backing_file(text("backing_file"))
        .backing_format(text("backing_fmt"))
        .data_file(text("data_file"))
        .data_file_raw(bool("data_file_raw"))
        .lazy_refcounts(bool("lazy_refcounts"))
        .refcount_bits(settings.integer("refcount_bits"))
        .key_slots(match amend_keys::is_asked_for(settings, "encrypt.") {
            true => Some(amend_keys::key_change(settings, "encrypt.", force)?),
            false => None,
        }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<AmendOptions> {
        super::parse(text, false, || Ok(()))
    }

    fn refusal(text: &str) -> String {
        parse(text).unwrap_err().message().to_owned()
    }

    #[test]
    fn only_what_is_given_changes() {
        let options = parse("size=0,lazy_refcounts").unwrap();
        let lazy = AmendOptions::default().lazy_refcounts(Some(true));
        assert_eq!(options, lazy);
        let options = parse("compat=v2,data_file=,refcount_bits=8,size=1k").unwrap();
        let all = AmendOptions::default()
            .version(Some(2))
            .data_file(Some(String::new()))
            .refcount_bits(Some(8))
            .size_bytes(Some(1024));
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
            options_of("raw").unwrap_err().message(),
            "Format driver 'raw' does not support option amendment"
        );
    }
}

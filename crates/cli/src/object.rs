//! `--object`: secrets, TLS credentials and other objects, created before images are opened.

use vellum::{Error, ErrorKind, Result};
use vellum_graph::{secret, throttle_groups, tls};
use vellum_options::Options;

/// The types that QEMU's tools know. Those that have no effect here are only
/// checked for a name.
const TYPES: &[&str] = &[
    "secret",
    "tls-cipher-suites",
    "authz-pam",
    "throttle-group",
    "iothread",
    "main-loop",
];

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "make object", message)
}

/// Makes the object that a text of `key=value,...` or JSON describes.
///
/// # Errors
/// In QEMU's words.
pub fn add(text: &str) -> Result<()> {
    let mut options = if text.starts_with('{') {
        Options::from_json(text)?
    } else {
        Options::parse_with_implied(text, Some("qom-type"))?
    };
    match options.take_text("qom-type")?.as_deref() {
        Some("secret") => secret::add(options),
        Some(secret::KEYRING) => secret::add_keyring(options),
        Some(throttle_groups::TYPE) => throttle_groups::add(options),
        Some(kind) if tls::is_type(kind) => tls::add(kind, options),
        Some(kind) if TYPES.contains(&kind) => match options.contains("id") {
            true => Ok(()),
            false => Err(invalid("Parameter 'id' is missing")),
        },
        Some(kind) => Err(invalid(format!(
            "Parameter 'qom-type' does not accept value '{kind}'"
        ))),
        None => Err(invalid("Parameter 'qom-type' is missing")),
    }
}

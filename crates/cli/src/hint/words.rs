//! Names in options that do not exist: formats, drivers, protocols, and what either may
//! be told.

use vellum_graph::{driver_names, option_names};
use vellum_images::create_options;
use vellum_options::filename;

use super::{after, closest};

/// Formats that can be made.
const FORMATS: [&str; 3] = ["qcow2", "raw", "luks"];

/// What objects, exports and servers may be told.
const OTHER_OPTIONS: [&str; 38] = [
    "addr.host",
    "addr.path",
    "addr.port",
    "addr.type",
    "allocation-depth",
    "bitmaps.0",
    "data",
    "description",
    "dir",
    "endpoint",
    "file",
    "filename",
    "format",
    "id",
    "identity",
    "iops-read",
    "iops-size",
    "iops-total",
    "iops-write",
    "iothread",
    "iv",
    "keyid",
    "limits.iops-total",
    "max-connections",
    "name",
    "node-name",
    "on-full",
    "passwordid",
    "policy",
    "priority",
    "refresh",
    "sanity-check",
    "tls-creds",
    "type",
    "username",
    "verify-peer",
    "writable",
    "writethrough",
];

/// Types of objects.
pub const OBJECTS: [&str; 11] = [
    "authz-list",
    "authz-list-file",
    "authz-simple",
    "iothread",
    "main-loop",
    "secret",
    "secret_keyring",
    "throttle-group",
    "tls-creds-anon",
    "tls-creds-psk",
    "tls-creds-x509",
];

/// What was probably meant by a name that an error complains of.
pub fn meant(message: &str) -> Option<String> {
    if let Some(key) = after(message, "Invalid parameter '") {
        return creation_option(key);
    }
    let name = if let Some(format) = after(message, "Unknown file format '") {
        closest(format, FORMATS)?.to_owned()
    } else if let Some(driver) = after(message, "Unknown driver '")
        .or_else(|| after(message, "Parameter 'driver' does not accept value '"))
    {
        closest(driver, driver_names())?.to_owned()
    } else if let Some(protocol) = after(message, "Unknown protocol '") {
        // With a colon, as it stands before a name.
        format!("{}:", closest(protocol, filename::schemes())?)
    } else if let Some((driver, key)) = node_option(message) {
        closest(key, option_names(driver))?.to_owned()
    } else if let Some(key) = after(message, "Parameter '")
        && message.contains("' is unexpected")
    {
        closest(key, OTHER_OPTIONS)?.to_owned()
    } else if let Some(kind) = after(message, "Parameter 'qom-type' does not accept value '") {
        closest(kind, OBJECTS)?.to_owned()
    } else {
        return None;
    };
    Some(format!("did you mean '{name}'?"))
}

/// An option of `-o`, of whatever format it is.
fn creation_option(key: &str) -> Option<String> {
    let options = FORMATS.into_iter().chain(["file"]);
    let options = options.filter_map(create_options::format_options);
    let name = closest(key, options.flatten().map(|option| option.name))?;
    Some(format!(
        "did you mean '{name}'? '-o help' lists the options"
    ))
}

/// A driver and the option that it does not have.
fn node_option(message: &str) -> Option<(&str, &str)> {
    let driver = after(message, "Block format '").or_else(|| after(message, "Block protocol '"))?;
    Some((driver, after(message, " the option '")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_that_was_meant_is_found() {
        for (message, name) in [
            ("Unknown file format 'qcow3'", "qcow2"),
            ("Unknown driver 'blkdebgu'", "blkdebug"),
            (
                "Could not open 'nbd+unxi:x': Unknown protocol 'nbd+unxi'",
                "nbd+unix:",
            ),
            (
                "Block format 'qcow2' does not support the option 'l2-cach-size'",
                "l2-cache-size",
            ),
            (
                "Block protocol 'file' doesn't support the option 'lokcing'",
                "locking",
            ),
            ("Parameter 'verify-per' is unexpected", "verify-peer"),
            (
                "Parameter 'qom-type' does not accept value 'secrte'",
                "secret",
            ),
        ] {
            let hint = format!("did you mean '{name}'?");
            assert_eq!(meant(message), Some(hint), "{message}");
        }
        let luks = meant("n: Invalid parameter 'cipher-algo'").unwrap();
        assert!(luks.starts_with("did you mean 'cipher-alg'?"), "{luks}");
        assert_eq!(meant("Parameter 'id' is missing"), None);
        assert_eq!(meant("Unknown driver 'frobnicate'"), None);
    }
}

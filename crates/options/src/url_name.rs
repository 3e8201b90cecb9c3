//! URLs of files on web servers and of objects in stores, to options and back.

use vellum::{Error, ErrorKind, Result};

use crate::options::{Options, Scalar};

/// The protocols of such names; each is a driver.
pub const SCHEMES: &[&str] = &["http", "https", "s3", "gs", "az"];
/// Those of object stores.
const STORES: &[&str] = &["s3", "gs", "az"];
/// Options that say what is seen, beside the URL. Names with these are told as `json:{}`.
const NAMING: &[&str] = &[
    "cookie",
    "cookie-secret",
    "header",
    "header-secret",
    "username",
    "password-secret",
    "proxy-username",
    "proxy-password-secret",
    "bearer-token-secret",
    "tls-ca-file",
    "tls-cert-file",
    "tls-key-file",
    "endpoint",
    "region",
    "access-key-id",
    "access-key-secret",
    "session-token-secret",
    "anonymous",
    "virtual-hosted-style",
];
const VERIFY: &str = "sslverify";

/// Whether names of this protocol belong here.
pub fn is_scheme(protocol: &str) -> bool {
    SCHEMES.contains(&protocol)
}

/// The options of the node that a name means.
pub fn options(name: &str, scheme: &str) -> Options {
    let mut options = Options::new();
    options.set_text("driver", scheme);
    options.set_text("url", name);
    options
}

/// Whether names of this protocol are of objects.
pub fn is_store(protocol: &str) -> bool {
    STORES.contains(&protocol)
}

/// Refuses a URL that is not the driver's.
///
/// # Errors
/// In QEMU's words for its drivers.
pub fn check(driver: &str, url: &str) -> Result<()> {
    let rest = url.strip_prefix(driver);
    if rest.is_some_and(|rest| rest.starts_with("://")) {
        return Ok(());
    }
    let kind = if is_store(driver) { "" } else { " curl" };
    let message = format!(
        "{driver}{kind} driver cannot handle the URL '{url}' (does not start with '{driver}://')"
    );
    Err(Error::new(ErrorKind::InvalidArgument, "open", message))
}

/// The URL, where it alone opens the same file again, and the options that say what is seen.
pub fn name_of(options: &Options) -> (Option<String>, Vec<(String, serde_json::Value)>) {
    let is_off = |value: &Scalar| match value {
        Scalar::Text(text) => text == "off",
        other => *other == Scalar::Bool(false),
    };
    let is_unsafe = |key: &str, value: &Scalar| key == VERIFY && is_off(value);
    let special = |(key, value): (&str, &Scalar)| NAMING.contains(&key) || is_unsafe(key, value);
    let plain = match options.iter().any(special) {
        true => None,
        false => options.get_text("url").map(str::to_owned),
    };
    let named = |key: &str| key == "url" || key == VERIFY || NAMING.contains(&key);
    let json = options.iter().filter(|(key, _)| named(key));
    let json = json.map(|(key, value)| (key.to_owned(), value.clone().into()));
    (plain, json.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_names_where_nothing_else_counts() {
        let name = |text: &str| name_of(&Options::parse(text).unwrap()).0;
        let url = Some("https://h/x".to_owned());
        assert_eq!(name("url=https://h/x"), url);
        assert_eq!(
            name("url=https://h/x,readahead=512,timeout=9,sslverify=on"),
            url
        );
        assert_eq!(name("url=https://h/x,sslverify=off"), None);
        assert_eq!(name("url=https://h/x,username=me"), None);
    }

    #[test]
    fn a_url_belongs_to_its_driver() {
        assert!(check("http", "http://h/x").is_ok());
        assert!(check("s3", "s3://b/k").is_ok() && check("s3", "gs://b/k").is_err());
        for (driver, url) in [
            ("http", "https://h/x"),
            ("https", "http://h"),
            ("http", "http:h"),
        ] {
            let error = check(driver, url).unwrap_err();
            let message = format!(
                "{driver} curl driver cannot handle the URL '{url}' (does not start with \
                 '{driver}://')"
            );
            assert_eq!(error.message(), message);
        }
    }
}

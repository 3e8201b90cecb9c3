//! Opening an image anew with other options: which may change, and which old ones a
//! new one replaces.

use vellum::qcow2::Metadata;
use vellum::{Error, ErrorKind, Result};
use vellum_options::{Options, Scalar};

use crate::drivers;

/// Options that every node may change.
pub(crate) const COMMON: [&str; 7] = [
    "read-only",
    "auto-read-only",
    "cache.direct",
    "cache.no-flush",
    "discard",
    "detect-zeroes",
    "force-share",
];

/// The drivers of an open image's nodes, which its options need not say.
#[derive(Debug, Clone, Copy)]
pub struct Drivers<'a> {
    /// That of the image.
    pub format: &'a str,
    /// That of its backing file, if it has one.
    pub backing: Option<&'a str>,
}

impl Drivers<'_> {
    /// Whether an option only says what is so by itself.
    fn imply(&self, key: &str, value: &str) -> bool {
        match key {
            "driver" => self.format == value,
            "backing.driver" => self.backing == Some(value),
            "file.driver" => value == "file",
            _ => false,
        }
    }
}

/// The options of an image with given drivers after a reopen: the new ones, and those
/// of the old ones that they leave in force.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for an option that cannot change.
pub fn merge(old: &Options, new: &Options, drivers: Drivers<'_>) -> Result<Options> {
    let format = drivers.format;
    let mut changes = Options::new();
    for (key, value) in new.iter() {
        let before = old.iter().find(|(other, _)| *other == key);
        let known = match before {
            Some((_, before)) => text(before) == text(value),
            None => drivers.imply(key, &text(value)),
        };
        if !known || before.is_some() {
            changes.set(key, value.clone());
        }
        if !known && !may_change(key, format) {
            let mut key = key;
            while let Some(inner) = strip_child(key) {
                key = inner;
            }
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "reopen",
                format!("Cannot change the option '{key}'"),
            ));
        }
    }
    let mut merged = old.clone();
    if format == "qcow2" {
        drop_replaced(&mut merged, new);
    }
    for (key, value) in changes.iter() {
        merged.set(key, value.clone());
    }
    let has = |options: &Options, key| options.contains(key);
    let sizes = ["cache-size", "l2-cache-size", "refcount-cache-size"];
    // Two new parts say the whole; three new ones contradict each other, as ever.
    if format == "qcow2" && sizes.iter().all(|key| has(&merged, key)) && !has(new, "cache-size") {
        merged.take("cache-size");
    }
    Ok(merged)
}

/// The option without the name of the child that it belongs to.
fn strip_child(key: &str) -> Option<&str> {
    let inner = key.strip_prefix("file.");
    inner.or_else(|| key.strip_prefix("backing."))
}

/// A value as it is written on a command line.
pub(crate) fn text(value: &Scalar) -> String {
    match value {
        Scalar::Text(text) => text.clone(),
        Scalar::Number(number) => number.to_string(),
        Scalar::Bool(true) => "on".to_owned(),
        Scalar::Bool(false) => "off".to_owned(),
        Scalar::Null => String::new(),
    }
}

fn may_change(key: &str, format: &str) -> bool {
    if COMMON.contains(&key) {
        return true;
    }
    if let Some(key) = key.strip_prefix("file.") {
        return COMMON.contains(&key) || key == "x-check-cache-dropped";
    }
    drivers::facts(format).is_some_and(|facts| facts.may_change(key))
}

/// Drops the old options of qcow2 that a new one says anew in other words.
fn drop_replaced(old: &mut Options, new: &Options) {
    if new.contains("overlap-check") || new.contains("overlap-check.template") {
        old.take("overlap-check");
        old.take("overlap-check.template");
        for kind in Metadata::ALL {
            old.take(&format!("overlap-check.{}", kind.option()));
        }
    }
    if new.contains("cache-size") {
        old.take("l2-cache-size");
        old.take("refcount-cache-size");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(old: &str, new: &str, format: &str) -> std::result::Result<String, String> {
        let (old, new) = (Options::parse(old).unwrap(), Options::parse(new).unwrap());
        let drivers = Drivers {
            format,
            backing: None,
        };
        let merged = merge(&old, &new, drivers).map_err(|error| error.message().to_owned())?;
        let words = merged
            .iter()
            .map(|(key, value)| format!("{key}={}", text(value)));
        Ok(words.collect::<Vec<_>>().join(","))
    }

    #[test]
    fn one_setting_replaces_what_says_the_same() {
        for (old, new, expected) in [
            (
                "file.filename=a,overlap-check=all,overlap-check.active-l1=off",
                "overlap-check.template=none",
                "file.filename=a,overlap-check.template=none",
            ),
            (
                "overlap-check=all",
                "overlap-check.active-l2=off",
                "overlap-check=all,overlap-check.active-l2=off",
            ),
            (
                "l2-cache-size=1,lazy-refcounts=on",
                "cache-size=2",
                "cache-size=2,lazy-refcounts=on",
            ),
            (
                "cache-size=2,l2-cache-size=1",
                "refcount-cache-size=1",
                "l2-cache-size=1,refcount-cache-size=1",
            ),
            (
                "",
                "cache-size=2,l2-cache-size=1,refcount-cache-size=1",
                "cache-size=2,l2-cache-size=1,refcount-cache-size=1",
            ),
        ] {
            assert_eq!(merged(old, new, "qcow2").unwrap(), expected);
        }
    }

    #[test]
    fn what_cannot_change_is_named() {
        assert_eq!(
            merged("file.filename=a", "file.filename=b", "raw").unwrap_err(),
            "Cannot change the option 'filename'"
        );
        assert_eq!(
            merged("", "cache-size=1", "raw").unwrap_err(),
            "Cannot change the option 'cache-size'"
        );
        assert_eq!(
            merged("", "driver=qcow2", "raw").unwrap_err(),
            "Cannot change the option 'driver'"
        );
        assert!(
            merged(
                "file.filename=a",
                "file.filename=a,size=1,driver=raw",
                "raw"
            )
            .is_ok()
        );
    }
}

//! The name of an image in a registry.

use std::fmt;

use vellum_io::{Error, ErrorKind, Result};

/// `REGISTRY/NAME:TAG`, or `REGISTRY/NAME@sha256:...`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    pub(super) registry: String,
    pub(super) repository: String,
    /// A tag or a digest.
    pub(super) version: String,
}

/// The longest name that registries know.
const MOST_NAME_BYTES: usize = 255;
const MOST_TAG_BYTES: usize = 128;

impl Reference {
    /// Understands a name, also with `oci://` or `docker://` before it. Without a tag it is `latest`.
    ///
    /// # Errors
    /// If there can be no such image, or the registry is left out.
    pub fn parse(text: &str) -> Result<Reference> {
        let name = ["oci://", "docker://"]
            .into_iter()
            .find_map(|scheme| text.strip_prefix(scheme))
            .unwrap_or(text);
        let Some((registry, rest)) = name.split_once('/') else {
            return wrong(text, "it names no registry");
        };
        let is_host = registry == "localhost" || registry.contains(['.', ':']);
        if !is_host || !registry.chars().all(is_of_host) {
            return wrong(text, "it does not begin with a registry, a host's name");
        }
        let (repository, version) = match rest.split_once('@') {
            Some((repository, digest)) => (repository, digest),
            None => rest.rsplit_once(':').unwrap_or((rest, "latest")),
        };
        let part = |part: &str| {
            let known = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c);
            part.starts_with(|c: char| c.is_ascii_alphanumeric()) && part.chars().all(known)
        };
        if repository.len() > MOST_NAME_BYTES || !repository.split('/').all(part) {
            return wrong(
                text,
                "the name has lowercase letters, digits and '._-/' only",
            );
        }
        if !is_tag(version) && !is_digest(version) {
            return wrong(text, "behind the name stands ':TAG' or '@sha256:DIGEST'");
        }
        Ok(Reference {
            registry: registry.to_owned(),
            repository: repository.to_owned(),
            version: version.to_owned(),
        })
    }

    /// The digest that it names, if it does.
    pub(super) fn digest(&self) -> Option<&str> {
        Some(self.version.as_str()).filter(|version| is_digest(version))
    }

    /// The host that is asked.
    pub(super) fn host(&self) -> &str {
        match self.registry.as_str() {
            // Its registry has another name than it is known by.
            "docker.io" => "registry-1.docker.io",
            host => host,
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Reference {
            registry,
            repository,
            version,
        } = self;
        let mark = if is_digest(version) { '@' } else { ':' };
        write!(f, "{registry}/{repository}{mark}{version}")
    }
}

fn is_of_host(c: char) -> bool {
    c.is_ascii_alphanumeric() || ".-:[]".contains(c)
}

fn is_tag(text: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let starts = text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    starts && text.len() <= MOST_TAG_BYTES && text.chars().skip(1).all(known)
}

/// Whether it is a SHA-256 as registries write it.
pub(super) fn is_digest(text: &str) -> bool {
    let digits = text.strip_prefix("sha256:").unwrap_or_default();
    let known = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    digits.len() == 64 && digits.chars().all(known)
}

fn wrong<T>(text: &str, why: &str) -> Result<T> {
    let message = format!("'{text}' is no image of a registry (REGISTRY/NAME:TAG): {why}");
    Err(Error::new(ErrorKind::InvalidArgument, "open", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        for (text, parts) in [
            ("localhost/a", ("localhost", "a", "latest")),
            (
                "oci://h.org:5000/a/b-c:v1.0",
                ("h.org:5000", "a/b-c", "v1.0"),
            ),
            (
                "docker://docker.io/library/x:_1",
                ("docker.io", "library/x", "_1"),
            ),
            (&format!("h.org/a@{digest}"), ("h.org", "a", &digest)),
        ] {
            let found = Reference::parse(text).unwrap();
            let Reference {
                registry,
                repository,
                version,
            } = &found;
            assert_eq!((&**registry, &**repository, &**version), parts, "{text}");
            assert_eq!(Reference::parse(&found.to_string()).unwrap(), found);
        }
        for text in [
            "",
            "a",
            "a/b",
            "h.org/",
            "h.org/A",
            "h.org//a",
            "h.org/a/..",
            "h.org/a:",
            "h.org/a:b/c",
            "h.org/a@sha256:00",
            "h.org/a:-",
            "u@h.org/a",
            "h.org/a?b",
            "h.org/../a",
            "h.org#/a",
        ] {
            assert!(Reference::parse(text).is_err(), "{text}");
        }
    }
}

//! What a user says of an object.

use std::fmt;

use vellum_io::{Error, ErrorKind, Result};
use zeroize::Zeroizing;

use crate::connection::ConnectionOptions;

/// Who asks an object store. Its debug output tells no secret.
#[derive(Clone, PartialEq, Eq, Default)]
pub enum ObjectCredentials {
    /// Whoever the environment names: its variables, a token file, or the role of this machine.
    #[default]
    Environment,
    /// Nobody: for what everybody may read.
    Anonymous,
    /// A pair of keys. Of Azure the first is the account's name.
    Keys {
        /// The name of the pair.
        access_key_id: String,
        /// Its secret.
        secret_access_key: Zeroizing<String>,
        /// What makes keys valid that were given for a time.
        session_token: Option<Zeroizing<String>>,
    },
}

impl fmt::Debug for ObjectCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ObjectCredentials::Environment => "Environment",
            ObjectCredentials::Anonymous => "Anonymous",
            ObjectCredentials::Keys { .. } => "Keys",
        })
    }
}

/// How an object is opened.
#[derive(Debug, Clone)]
pub struct ObjectOptions {
    /// Where it is: `s3://BUCKET/KEY`, `gs://BUCKET/KEY` or `az://CONTAINER/BLOB`.
    pub url: String,
    /// The store's URL, if it is not the one of the cloud.
    pub endpoint: Option<String>,
    /// The store's region, where it has such.
    pub region: Option<String>,
    /// Who asks.
    pub credentials: ObjectCredentials,
    /// The bucket is a part of the host's name rather than of the path.
    pub virtual_hosted: bool,
    /// As [`HttpOptions::readahead_bytes`](crate::HttpOptions::readahead_bytes).
    pub readahead_bytes: u64,
    /// As [`HttpOptions::keep_bytes`](crate::HttpOptions::keep_bytes).
    pub keep_bytes: u64,
    /// How the store is spoken to.
    pub connection: ConnectionOptions,
}

/// Kinds of stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    S3,
    Google,
    Azure,
}

/// What a URL names.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) kind: Kind,
    pub(super) bucket: String,
    pub(super) key: String,
}

impl ObjectOptions {
    /// An object, with everything else from the environment.
    pub fn new(url: impl Into<String>) -> Self {
        ObjectOptions {
            url: url.into(),
            endpoint: None,
            region: None,
            credentials: ObjectCredentials::default(),
            virtual_hosted: false,
            readahead_bytes: 256 << 10,
            keep_bytes: crate::fetch::MOST_KEPT_BYTES,
            connection: ConnectionOptions::default(),
        }
    }

    pub(super) fn place(&self) -> Result<Place> {
        let wrong = |why: &str| {
            let message = format!("'{}' names no object: {why}", self.url);
            Error::new(ErrorKind::InvalidArgument, "open", message)
        };
        let (scheme, rest) = self.url.split_once("://").unwrap_or_default();
        let kind = match scheme {
            "s3" => Kind::S3,
            "gs" => Kind::Google,
            "az" => Kind::Azure,
            _ => return Err(wrong("it does not begin with s3://, gs:// or az://")),
        };
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() || bucket.contains(['?', '#', '@', ':']) {
            return Err(wrong("a bucket's name is wanted behind the slashes"));
        }
        if key.is_empty() || key.ends_with('/') {
            return Err(wrong("a key is wanted behind the bucket's name"));
        }
        Ok(Place {
            kind,
            bucket: bucket.to_owned(),
            key: key.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_a_bucket_and_a_key() {
        let place = |url: &str| ObjectOptions::new(url).place();
        let made = place("s3://images/golden/a b.qcow2").unwrap();
        assert_eq!((made.kind, &*made.bucket), (Kind::S3, "images"));
        assert_eq!(made.key, "golden/a b.qcow2");
        assert_eq!(place("gs://b/k").unwrap().kind, Kind::Google);
        assert_eq!(place("az://b/k").unwrap().kind, Kind::Azure);
        for url in [
            "s3:",
            "s3://",
            "s3://b",
            "s3://b/",
            "s3:///k",
            "s3://b/k/",
            "s4://b/k",
            "b/k",
            "s3://me:pw@b/k",
        ] {
            assert!(place(url).is_err(), "{url}");
        }
    }
}

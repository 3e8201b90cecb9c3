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

    /// Whether the URL names an object, and its store knows what the other options say.
    ///
    /// # Errors
    /// If it does not, or its store does not know one of them.
    pub fn check(&self) -> Result<()> {
        self.place().map(drop)
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
        // What the clouds allow, together; other characters would mean something in the store's URL.
        let is_name = |c: char| c.is_ascii_alphanumeric() || "._-$".contains(c);
        if bucket.is_empty() || bucket.starts_with('.') || !bucket.chars().all(is_name) {
            return Err(wrong("a bucket's name is wanted behind the slashes"));
        }
        if key.is_empty() || key.ends_with('/') {
            return Err(wrong("a key is wanted behind the bucket's name"));
        }
        if let Some(refusal) = self.unknown_to(kind) {
            let message = format!("{scheme}:// has {refusal}");
            return Err(Error::new(ErrorKind::InvalidArgument, "open", message));
        }
        Ok(Place {
            kind,
            bucket: bucket.to_owned(),
            key: key.to_owned(),
        })
    }

    /// What a store does not know of what the options say: it would be left out without a word.
    fn unknown_to(&self, kind: Kind) -> Option<&'static str> {
        let has_token = matches!(
            &self.credentials,
            ObjectCredentials::Keys {
                session_token: Some(_),
                ..
            }
        );
        match kind {
            Kind::S3 => None,
            _ if self.region.is_some() => Some("no regions"),
            _ if self.virtual_hosted => Some("no buckets in the names of hosts"),
            Kind::Google if matches!(self.credentials, ObjectCredentials::Keys { .. }) => Some(
                "no pairs of keys: the environment names a service account \
                 (GOOGLE_SERVICE_ACCOUNT, GOOGLE_APPLICATION_CREDENTIALS)",
            ),
            Kind::Azure if has_token => Some("no session tokens"),
            Kind::Google | Kind::Azure => None,
        }
    }
}

/// Refuses an endpoint that is no URL of a server.
pub(super) fn check_endpoint(endpoint: Option<String>) -> Result<()> {
    let Some(endpoint) = endpoint else {
        return Ok(());
    };
    let url = reqwest::Url::parse(&endpoint).ok();
    let is_server = |url: &reqwest::Url| matches!(url.scheme(), "http" | "https") && url.has_host();
    match url.as_ref().is_some_and(is_server) {
        true => Ok(()),
        false => Err(Error::new(
            ErrorKind::InvalidArgument,
            "open",
            format!("the endpoint '{endpoint}' is no URL of a server (http://… or https://…)"),
        )),
    }
}

/// Refuses what cannot stand in a request's head.
pub(super) fn check_word(what: &str, text: Option<String>) -> Result<()> {
    let Some(text) = text else {
        return Ok(());
    };
    match !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic()) {
        true => Ok(()),
        false => Err(Error::new(
            ErrorKind::InvalidArgument,
            "open",
            format!("{what} is one word of ASCII"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_store_does_not_know_is_refused() {
        let keys = |session_token| ObjectCredentials::Keys {
            access_key_id: "a".to_owned(),
            secret_access_key: Zeroizing::new("b".to_owned()),
            session_token,
        };
        let with = |change: &dyn Fn(&mut ObjectOptions), url: &str| {
            let mut options = ObjectOptions::new(url);
            change(&mut options);
            options.check().map_err(|error| error.message().to_owned())
        };
        let region = |it: &mut ObjectOptions| it.region = Some("r".to_owned());
        let hosts = |it: &mut ObjectOptions| it.virtual_hosted = true;
        let pair = |it: &mut ObjectOptions| it.credentials = keys(None);
        let lent = |it: &mut ObjectOptions| {
            it.credentials = keys(Some(Zeroizing::new("t".to_owned())));
        };
        let nobody = |it: &mut ObjectOptions| it.credentials = ObjectCredentials::Anonymous;
        for url in ["gs://b/k", "az://b/k"] {
            assert!(with(&region, url).unwrap_err().contains("regions"));
            assert!(with(&hosts, url).unwrap_err().contains("names of hosts"));
            with(&nobody, url).unwrap();
        }
        let refused = with(&pair, "gs://b/k").unwrap_err();
        assert!(refused.contains("GOOGLE_SERVICE_ACCOUNT"), "{refused}");
        with(&pair, "az://b/k").unwrap();
        let refused = with(&lent, "az://b/k").unwrap_err();
        assert!(refused.contains("session tokens"), "{refused}");
        for change in [&region as &dyn Fn(&mut ObjectOptions), &hosts, &pair, &lent] {
            with(change, "s3://b/k").unwrap();
        }
    }

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
            "s3://../b/k",
            "s3://a b/k",
        ] {
            assert!(place(url).is_err(), "{url}");
        }
    }

    #[test]
    fn what_no_request_can_hold_is_refused() {
        assert!(check_endpoint(Some("http://127.0.0.1:9000".to_owned())).is_ok());
        for endpoint in ["", "foo", "ftp://h", "http://", "/x"] {
            assert!(
                check_endpoint(Some(endpoint.to_owned())).is_err(),
                "{endpoint}"
            );
        }
        assert!(check_word("x", Some("eu-central-1".to_owned())).is_ok());
        for word in ["", "a b", "a\nb", "ä"] {
            assert!(check_word("x", Some(word.to_owned())).is_err(), "{word:?}");
        }
    }
}

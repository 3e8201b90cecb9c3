//! `s3`, `gs` and `az`: objects of object stores, to be read.

use vellum::Result;
use vellum_options::{Options, url_name};
use vellum_remote::{ObjectCredentials, ObjectOptions, RemoteStorage};

use crate::node::driver::DriverFacts;
use crate::node::errors::{invalid, refuse_unknown};
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::open::context::OpenContext;

use super::server_options::{self, take_secret};

/// What says where an object is, and how its store is reached.
pub(super) const OPTIONS: &[&str] = &[
    "url",
    "endpoint",
    "region",
    "access-key-id",
    "access-key-secret",
    "session-token-secret",
    "anonymous",
    "virtual-hosted-style",
    "readahead",
    "keep-size",
    "timeout",
    "proxy-username",
    "proxy-password-secret",
    "sslverify",
    "tls-ca-file",
    "tls-cert-file",
    "tls-key-file",
];

/// The drivers, which differ in their names.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[OPTIONS],

    ..DriverFacts::named("s3")
};

pub(super) async fn open(
    driver: &'static str,
    mut options: Options,
    common: CommonOptions,
    _around: OpenContext,
) -> Result<OpenedNode> {
    if common.writable {
        return Err(invalid(
            "an object cannot be changed in place: make an overlay here ('create -b') and write to \
             that, or put a whole image there ('convert')",
        ));
    }
    let object = take(driver, &mut options)?;
    refuse_unknown(&options, driver)?;
    let storage = RemoteStorage::open_object(object).await?;
    Ok(OpenedNode::remote(FACTS.called(driver), storage))
}

/// The object that options describe; takes them.
///
/// # Errors
/// If one of them is missing or wrong.
pub fn take(driver: &str, options: &mut Options) -> Result<ObjectOptions> {
    let Some(url) = options.take_text("url")? else {
        return Err(invalid(format!("{driver} driver requires an 'url' option")));
    };
    url_name::check(driver, &url)?;
    let mut object = ObjectOptions::new(url);
    let readahead_bytes = server_options::take_readahead(options)?;
    object.readahead_bytes = readahead_bytes.unwrap_or(object.readahead_bytes);
    object.keep_bytes = options.take_size("keep-size")?.unwrap_or(object.keep_bytes);
    object.connection = server_options::take_times(options)?;
    object.connection.verify = options.take_bool("sslverify")?.unwrap_or(true);
    server_options::take_rest(options, &mut object.connection)?;
    object.endpoint = options.take_text("endpoint")?;
    object.region = options.take_text("region")?;
    object.virtual_hosted = options
        .take_bool("virtual-hosted-style")?
        .unwrap_or_default();
    object.credentials = take_credentials(options)?;
    object.check()?;
    Ok(object)
}

fn take_credentials(options: &mut Options) -> Result<ObjectCredentials> {
    let anonymous = options.take_bool("anonymous")?.unwrap_or_default();
    let id = options.take_text("access-key-id")?;
    let secret = take_secret(options, "access-key-secret")?;
    let session_token = take_secret(options, "session-token-secret")?;
    match (id, secret) {
        (Some(access_key_id), Some(secret_access_key)) if !anonymous => {
            Ok(ObjectCredentials::Keys {
                access_key_id,
                secret_access_key,
                session_token,
            })
        }
        (None, None) if session_token.is_some() => Err(invalid(
            "session-token-secret needs access-key-id and access-key-secret",
        )),
        (None, None) if anonymous => Ok(ObjectCredentials::Anonymous),
        (None, None) => Ok(ObjectCredentials::Environment),
        _ if anonymous => Err(invalid("anonymous excludes access-key-id")),
        _ => Err(invalid(
            "access-key-id and access-key-secret need each other",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_whole_or_none() {
        let taken = |text: &str| take("s3", &mut Options::parse(text).unwrap());
        let object = taken("url=s3://b/k,endpoint=http://h:1,region=r,timeout=7").unwrap();
        assert_eq!(object.credentials, ObjectCredentials::Environment);
        assert_eq!(object.endpoint.as_deref(), Some("http://h:1"));
        assert_eq!(object.connection.timeout.as_secs(), 7);
        let object = taken("url=s3://b/k,anonymous=on").unwrap();
        assert_eq!(object.credentials, ObjectCredentials::Anonymous);
        for (text, message) in [
            ("region=r", "s3 driver requires an 'url' option"),
            (
                "url=s3://b/k,access-key-id=a",
                "access-key-id and access-key-secret need each other",
            ),
            (
                "url=gs://b/k",
                "s3 driver cannot handle the URL 'gs://b/k' (does not start with 's3://')",
            ),
            (
                "url=s3://b/k,access-key-id=a,anonymous=on",
                "anonymous excludes access-key-id",
            ),
        ] {
            assert_eq!(taken(text).unwrap_err().message(), message, "{text}");
        }
    }
}

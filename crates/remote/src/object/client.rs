//! Opens the store that an object lies in.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::{
    ClientOptions, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpService,
};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::multipart::MultipartStore;
use object_store::{ObjectStore, RetryConfig};
use vellum_io::{Error, ErrorKind, Result};

use super::options::{self, Kind, ObjectCredentials, ObjectOptions, Place};
use super::store_failure::{NoRole, Silent, TryAgain};
use crate::connection::{ConnectionOptions, Silence};
use crate::failure::told;
use crate::sending::{Moved, SILENCES, Watched};

/// What a store can do here.
pub(super) trait Objects: ObjectStore + MultipartStore {}
impl<T: ObjectStore + MultipartStore> Objects for T {}

/// A store of objects.
pub(super) type Store = Arc<dyn Objects>;

/// Makes connections as the user has said, and tells answers apart that may become others. Which
/// requests are made again is decided by those who make them.
#[derive(Debug, Clone)]
struct Connector(Arc<Clients>);

#[derive(Debug)]
struct Clients {
    options: ConnectionOptions,
    /// By whether they are secure, and whether they send.
    made: [[OnceLock<reqwest::Client>; 2]; 2],
}

impl Clients {
    fn client(&self, secure: bool, silence: Silence) -> Result<&reqwest::Client, HttpError> {
        let sends = silence == Silence::Caller;
        let place = &self.made[usize::from(secure)][usize::from(sends)];
        if let Some(client) = place.get() {
            return Ok(client);
        }
        let made = self.options.client(secure, silence);
        let made = made.map_err(|error| HttpError::new(HttpErrorKind::Request, error))?;
        Ok(place.get_or_init(|| made))
    }

    /// Sends a request that changes something, and may have a body; its answer is a short one.
    async fn send(&self, client: &reqwest::Client, request: HttpRequest) -> Answered {
        let silence = SILENCES * self.options.timeout;
        let silent = || HttpError::new(HttpErrorKind::Timeout, Silent(silence));
        let moved = Moved::new();
        let (parts, body) = request.into_parts();
        let url = parts.uri.to_string();
        let request = client
            .request(parts.method, url)
            .headers(parts.headers)
            .body(reqwest::Body::wrap(Watched::new(body, moved.clone())));
        let answer = moved.answer(silence, request.send()).await;
        let mut answer = answer.ok_or_else(silent)?.map_err(broken)?;
        let mut head = http::Response::new(());
        *head.status_mut() = answer.status();
        *head.headers_mut() = answer.headers().clone();
        let mut body = Vec::new();
        let read = tokio::time::timeout(silence, async {
            while let Some(chunk) = answer.chunk().await? {
                body.extend_from_slice(&chunk);
                if body.len() > MOST_ANSWER_BYTES {
                    break;
                }
            }
            Ok(())
        });
        read.await.map_err(|_| silent())?.map_err(broken)?;
        Ok(head.map(|()| Bytes::from(body).into()))
    }
}

type Answered = Result<HttpResponse, HttpError>;

/// What a store says of something that was sent is some lines long.
const MOST_ANSWER_BYTES: usize = 1 << 20;

fn broken(error: reqwest::Error) -> HttpError {
    let kind = match (error.is_connect(), error.is_timeout()) {
        (true, _) => HttpErrorKind::Connect,
        (false, true) => HttpErrorKind::Timeout,
        (false, false) => HttpErrorKind::Interrupted,
    };
    HttpError::new(kind, error.without_url())
}

impl HttpConnector for Connector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for Connector {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let secure = request.uri().scheme_str() != Some("http");
        let asks_role = asks_role(request.uri());
        let answer = match request.method().is_safe() {
            true => self.0.client(secure, Silence::Client)?.call(request).await,
            false => {
                let client = self.0.client(secure, Silence::Caller)?;
                self.0.send(client, request).await
            }
        };
        let answer = answer.map_err(|error| match asks_role {
            true => HttpError::new(error.kind(), NoRole(told(&error))),
            false => error,
        })?;
        let status = answer.status().as_u16();
        match status {
            408 | 429 | 500 | 502 | 503 | 504 => {
                let wait = answer.headers().get(http::header::RETRY_AFTER);
                let wait = wait.and_then(|wait| wait.to_str().ok()?.parse().ok());
                let wait = wait.map(Duration::from_secs);
                let again = TryAgain { status, wait };
                Err(HttpError::new(HttpErrorKind::Unknown, again))
            }
            _ => Ok(answer),
        }
    }
}

/// What Amazon's machines ask for the keys of their role, unless the environment names another server.
const ROLE_SERVER: &str = "http://169.254.169.254";

/// Whether a request is for the keys of this machine's role: where nobody has said any, the crate makes it.
fn asks_role(url: &http::Uri) -> bool {
    let server = std::env::var("AWS_METADATA_ENDPOINT");
    let server = server.as_deref().unwrap_or(ROLE_SERVER);
    let is_path = |path: &str| url.path().starts_with(path);
    (is_path("/latest/api/token") || is_path("/latest/meta-data/iam/"))
        && url.to_string().starts_with(server.trim_end_matches('/'))
}

fn no_retries() -> RetryConfig {
    RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    }
}

/// A failure of the crate's to set something up.
fn unusable(error: &object_store::Error) -> Error {
    let message = format!("cannot use the object store: {}", told(error));
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

pub(super) fn store(options: &ObjectOptions, place: &Place) -> Result<Store> {
    let connector = Connector(Arc::new(Clients {
        options: options.connection.clone(),
        made: Default::default(),
    }));
    let made = match place.kind {
        Kind::S3 => s3(options, place, connector),
        Kind::Google => google(options, place, connector),
        Kind::Azure => azure(options, place, connector),
    };
    made.map_err(|error| error.target(&options.url))
}

fn s3(options: &ObjectOptions, place: &Place, connector: Connector) -> Result<Store> {
    let mut builder = match &options.credentials {
        ObjectCredentials::Environment => AmazonS3Builder::from_env(),
        ObjectCredentials::Anonymous => AmazonS3Builder::new().with_skip_signature(true),
        ObjectCredentials::Keys {
            access_key_id,
            secret_access_key,
            session_token,
        } => {
            let builder = AmazonS3Builder::new()
                .with_access_key_id(access_key_id)
                .with_secret_access_key(secret_access_key.as_str());
            match session_token {
                Some(token) => builder.with_token(token.as_str()),
                None => builder,
            }
        }
    };
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if let Some(region) = &options.region {
        builder = builder.with_region(region);
    }
    // The crate takes these as they come, also from the environment.
    let said = |key| builder.get_config_value(&key);
    options::check_endpoint(said(AmazonS3ConfigKey::Endpoint))?;
    options::check_endpoint(said(AmazonS3ConfigKey::S3Endpoint))?;
    options::check_word("the region", said(AmazonS3ConfigKey::Region))?;
    options::check_word("an access key", said(AmazonS3ConfigKey::AccessKeyId))?;
    options::check_word("a session token", said(AmazonS3ConfigKey::Token))?;
    let store = builder
        .with_bucket_name(&place.bucket)
        .with_virtual_hosted_style_request(options.virtual_hosted)
        .with_allow_http(true)
        .with_retry(no_retries())
        .with_http_connector(connector)
        .build()
        .map_err(|error| unusable(&error))?;
    Ok(Arc::new(store))
}

fn google(options: &ObjectOptions, place: &Place, connector: Connector) -> Result<Store> {
    let mut builder = GoogleCloudStorageBuilder::from_env();
    if options.credentials == ObjectCredentials::Anonymous {
        builder = builder.with_skip_signature(true);
    }
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_config(GoogleConfigKey::BaseUrl, endpoint);
    }
    options::check_endpoint(builder.get_config_value(&GoogleConfigKey::BaseUrl))?;
    let store = builder
        .with_bucket_name(&place.bucket)
        .with_retry(no_retries())
        .with_http_connector(connector)
        .build()
        .map_err(|error| unusable(&error))?;
    Ok(Arc::new(store))
}

fn azure(options: &ObjectOptions, place: &Place, connector: Connector) -> Result<Store> {
    let mut builder = MicrosoftAzureBuilder::from_env();
    match &options.credentials {
        ObjectCredentials::Environment => {}
        ObjectCredentials::Anonymous => builder = builder.with_skip_signature(true),
        ObjectCredentials::Keys {
            access_key_id,
            secret_access_key,
            ..
        } => {
            builder = builder
                .with_account(access_key_id)
                .with_access_key(secret_access_key.as_str());
        }
    }
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(endpoint.clone());
    }
    options::check_endpoint(builder.get_config_value(&AzureConfigKey::Endpoint))?;
    options::check_word(
        "the account's name",
        builder.get_config_value(&AzureConfigKey::AccountName),
    )?;
    let store = builder
        .with_container_name(&place.bucket)
        .with_allow_http(true)
        .with_retry(no_retries())
        .with_http_connector(connector)
        .build()
        .map_err(|error| unusable(&error))?;
    Ok(Arc::new(store))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_for_a_role_are_told_from_those_for_objects() {
        let asks = |url: &str| asks_role(&url.parse().expect("a URL"));
        assert!(asks("http://169.254.169.254/latest/api/token"));
        assert!(asks(
            "http://169.254.169.254/latest/meta-data/iam/security-credentials/"
        ));
        assert!(!asks("http://127.0.0.1:9000/latest/api/token"));
        assert!(!asks("http://169.254.169.254/images/golden"));
    }
}

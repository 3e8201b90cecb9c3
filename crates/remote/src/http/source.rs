//! Requests to the server: a range of the version that was opened.

use std::fmt;
use std::ops::Range;
use std::sync::OnceLock;
use std::time::Duration;

use parking_lot::Mutex;
use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, COOKIE, HeaderMap, HeaderName, HeaderValue, IF_MATCH,
    IF_UNMODIFIED_SINCE, LOCATION, RANGE,
};
use reqwest::{Certificate, Client, Identity, NoProxy, Proxy, Response, StatusCode, Url, redirect};
use tokio::time::{Instant, timeout_at};
use vellum_io::{Error, ErrorKind};

use super::answer::{self, Content, Version};
use super::{Credentials, HttpOptions};

/// How often a server may lead on to another place.
const MOST_REDIRECTS: usize = 10;
/// A connection that was not used for so long may be closed on its way: servers keep them for
/// 60 seconds and more.
const IDLE_LIMIT: Duration = Duration::from_secs(30);

/// What becomes of a request that failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// There is no connection to the server.
    Unreachable(Error),
    /// It may be tried again, after this time if the server says one.
    Passing(Error, Option<Duration>),
    /// The server has no time for so many requests.
    Busy(Error, Option<Duration>),
    /// It would fail again.
    Final(Error),
}

impl Failure {
    pub(crate) fn into_error(self) -> Error {
        match self {
            Failure::Unreachable(error)
            | Failure::Passing(error, _)
            | Failure::Busy(error, _)
            | Failure::Final(error) => error,
        }
    }
}

/// A file on a server.
pub(crate) struct Source {
    options: HttpOptions,
    url: Url,
    /// Where the server has led to.
    place: Mutex<Option<Url>>,
    plain: OnceLock<Client>,
    secure: OnceLock<Client>,
    version: OnceLock<Version>,
    /// The URL for messages: without a password.
    name: String,
}

/// An answer whose head was looked at.
pub(super) struct Answer {
    pub(super) response: Response,
    pub(super) content: Content,
}

fn failed(kind: ErrorKind, message: impl Into<String>) -> Error {
    Error::new(kind, "read", message)
}

/// What an error of the client's says, with its causes.
fn told(error: &reqwest::Error) -> String {
    let mut next = std::error::Error::source(error);
    let mut last = error.to_string();
    // The innermost has the reason; those around it say that there was one.
    while let Some(source) = next {
        last = match source.downcast_ref::<std::io::Error>() {
            Some(error) => vellum_io::error::io_text(error),
            None => source.to_string(),
        };
        next = source.source();
    }
    last
}

impl Source {
    pub(super) fn new(options: HttpOptions) -> Result<Self, Error> {
        let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, "open", message);
        let mut url = Url::parse(&options.url)
            .map_err(|error| invalid(format!("'{}' is no URL: {error}", options.url)))?;
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            let message = format!("'{}' is no URL of a file on a web server", options.url);
            return Err(invalid(message));
        }
        let mut shown = url.clone();
        if shown.password().is_some() {
            // It cannot fail for a URL with a host.
            let _ = shown.set_password(Some("***"));
        }
        url.set_fragment(None);
        Ok(Source {
            options,
            url,
            place: Mutex::new(None),
            plain: OnceLock::new(),
            secure: OnceLock::new(),
            version: OnceLock::new(),
            name: shown.to_string(),
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.options.timeout
    }

    pub(super) fn options(&self) -> &HttpOptions {
        &self.options
    }

    /// Sets the version that all later answers must be of.
    pub(super) fn set_version(&self, version: Version) {
        let _ = self.version.set(version);
    }

    fn client(&self, url: &Url) -> Result<Client, Failure> {
        let secure = url.scheme() == "https";
        let place = if secure { &self.secure } else { &self.plain };
        if let Some(client) = place.get() {
            return Ok(client.clone());
        }
        let client = self.build(secure).map_err(Failure::Final)?;
        Ok(place.get_or_init(|| client).clone())
    }

    fn build(&self, secure: bool) -> Result<Client, Error> {
        // Whatever the program has chosen already is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let timeout = self.options.timeout;
        let mut builder = Client::builder()
            .redirect(redirect::Policy::none())
            .http1_only()
            .referer(false)
            .connect_timeout(timeout)
            .read_timeout(timeout)
            .pool_idle_timeout(IDLE_LIMIT);
        if secure && self.options.verify {
            builder = builder.tls_certs_merge(self.authorities()?);
        } else {
            // Of connections in the clear nothing is verified: so the system's certificates
            // are not read for them.
            builder = builder.tls_danger_accept_invalid_certs(true);
        }
        if let Some(identity) = self.identity()?.filter(|_| secure) {
            builder = builder.identity(identity);
        }
        for proxy in self.proxies()? {
            builder = builder.proxy(proxy);
        }
        builder.build().map_err(|error| {
            let message = format!("cannot set up connections: {}", told(&error));
            Error::new(ErrorKind::InvalidArgument, "open", message)
        })
    }

    fn authorities(&self) -> Result<Vec<Certificate>, Error> {
        let Some(path) = &self.options.authorities else {
            return Ok(Vec::new());
        };
        let bytes = std::fs::read(path).map_err(|error| unreadable(path, &error))?;
        let found = Certificate::from_pem_bundle(&bytes).unwrap_or_default();
        if found.is_empty() {
            return Err(no_pem(path, "certificate"));
        }
        Ok(found)
    }

    fn identity(&self) -> Result<Option<Identity>, Error> {
        let Some((certificate, key)) = &self.options.certificate else {
            return Ok(None);
        };
        let mut pem =
            vellum_storage::secret::read_file(key).map_err(|error| unreadable(key, &error))?;
        if certificate != key {
            let more =
                std::fs::read(certificate).map_err(|error| unreadable(certificate, &error))?;
            pem.push(b'\n');
            pem.extend_from_slice(&more);
        }
        let identity = Identity::from_pem(&pem);
        identity
            .map(Some)
            .map_err(|_| no_pem(key, "certificate with its key"))
    }

    /// The proxies of the environment, where a name and a password are to be shown to them.
    /// Without these the client looks for them itself.
    fn proxies(&self) -> Result<Vec<Proxy>, Error> {
        let Some(Credentials::Basic { username, password }) = &self.options.proxy_credentials
        else {
            return Ok(Vec::new());
        };
        let password = password.as_ref().map_or("", |password| password.as_str());
        let named = |names: &[&str]| {
            let found = names.iter().find_map(|name| std::env::var(name).ok());
            found.filter(|url| !url.is_empty())
        };
        let mut proxies = Vec::new();
        let add = |proxy: reqwest::Result<Proxy>| {
            let proxy = proxy.map_err(|error| {
                let message = format!("the proxy that the environment names: {}", told(&error));
                Error::new(ErrorKind::InvalidArgument, "open", message)
            })?;
            let proxy = proxy.basic_auth(username, password);
            Ok::<_, Error>(proxy.no_proxy(NoProxy::from_env()))
        };
        if let Some(url) = named(&["http_proxy"]) {
            proxies.push(add(Proxy::http(url))?);
        }
        if let Some(url) = named(&["https_proxy", "HTTPS_PROXY"]) {
            proxies.push(add(Proxy::https(url))?);
        }
        if let Some(url) = named(&["all_proxy", "ALL_PROXY"]) {
            proxies.push(add(Proxy::all(url))?);
        }
        Ok(proxies)
    }

    /// The headers of a request to a place; credentials only to the server that the user named.
    fn headers(&self, place: &Url, range: &Range<u64>) -> Result<HeaderMap, Failure> {
        let mut headers = HeaderMap::new();
        let mut add = |name: HeaderName, text: &str, secret: bool| {
            let mut value = HeaderValue::from_str(text).map_err(|_| {
                let message = format!("{name} cannot hold a line end or other control characters");
                Failure::Final(failed(ErrorKind::InvalidArgument, message))
            })?;
            value.set_sensitive(secret);
            headers.insert(name, value);
            Ok::<_, Failure>(())
        };
        let text = format!("bytes={}-{}", range.start, range.end - 1);
        add(RANGE, &text, false)?;
        add(ACCEPT_ENCODING, "identity", false)?;
        if let Some(version) = self.version.get() {
            match (version.strong_etag(), version.modified()) {
                (Some(etag), _) => add(IF_MATCH, etag, false)?,
                (None, Some(modified)) => add(IF_UNMODIFIED_SINCE, modified, false)?,
                (None, None) => {}
            }
        }
        if place.origin() == self.url.origin() {
            if let Some(cookie) = &self.options.cookie {
                add(COOKIE, cookie, true)?;
            }
            if let Some(Credentials::Bearer(token)) = &self.options.credentials {
                let text = zeroize::Zeroizing::new(format!("Bearer {}", token.as_str()));
                add(AUTHORIZATION, &text, true)?;
            }
        }
        Ok(headers)
    }

    async fn send(&self, place: &Url, range: &Range<u64>) -> Result<Response, Failure> {
        let mut request = self
            .client(place)?
            .get(place.clone())
            .headers(self.headers(place, range)?);
        if let Some(Credentials::Basic { username, password }) = &self.options.credentials
            && place.origin() == self.url.origin()
        {
            request = request.basic_auth(username, password.as_ref().map(|text| text.as_str()));
        }
        request.send().await.map_err(|error| self.broken(&error))
    }

    pub(super) fn broken(&self, error: &reqwest::Error) -> Failure {
        let text = told(error);
        let seconds = self.options.timeout.as_secs_f32();
        let io = |message| failed(ErrorKind::Io, message).target(self.name());
        if error.is_timeout() {
            let message =
                format!("the server has been silent for {seconds} seconds (option 'timeout')");
            return Failure::Passing(io(message), None);
        }
        match error.is_connect() {
            true => Failure::Unreachable(io(format!("Failed to connect: {text}"))),
            false => Failure::Passing(io(format!("the connection broke: {text}")), None),
        }
    }

    /// Bytes drip in.
    pub(super) fn too_slow(&self) -> Failure {
        let message = "the server sends too little in its time (option 'timeout')";
        let error = failed(ErrorKind::Io, message);
        Failure::Passing(error.target(self.name()), None)
    }

    /// Sends a request for a range, wherever the server leads to.
    pub(super) async fn ask(&self, range: &Range<u64>) -> Result<Answer, Failure> {
        let known = self.place.lock().clone();
        if let Some(place) = known {
            match self.ask_from(place, range).await {
                // The way there may have been for a time only.
                Err(Failure::Final(_) | Failure::Unreachable(_)) => *self.place.lock() = None,
                other => return other,
            }
        }
        self.ask_from(self.url.clone(), range).await
    }

    async fn ask_from(&self, mut place: Url, range: &Range<u64>) -> Result<Answer, Failure> {
        for _ in 0..=MOST_REDIRECTS {
            let response = self.send(&place, range).await?;
            if !response.status().is_redirection() || response.status() == StatusCode::NOT_MODIFIED
            {
                if place != self.url {
                    *self.place.lock() = Some(place);
                }
                return self.look(response);
            }
            place = self.next_place(&place, &response).map_err(|message| {
                Failure::Final(failed(ErrorKind::Protocol, message).target(self.name()))
            })?;
        }
        let message = format!("the server leads on more than {MOST_REDIRECTS} times");
        let error = failed(ErrorKind::Protocol, message);
        Err(Failure::Final(error.target(self.name())))
    }

    fn next_place(&self, place: &Url, response: &Response) -> Result<Url, String> {
        let target = response.headers().get(LOCATION);
        let target = target.and_then(|target| target.to_str().ok());
        let target = target.ok_or("the server leads on, and does not say where")?;
        let mut next = place
            .join(target)
            .map_err(|_| format!("the server leads on to '{target}', which is no URL"))?;
        next.set_fragment(None);
        match next.scheme() {
            "https" => Ok(next),
            "http" if place.scheme() == "http" || !self.options.verify => Ok(next),
            "http" => Err(format!(
                "the server leads from https to '{next}', where nobody can tell who answers; \
                 name that URL yourself if that is fine"
            )),
            _ => Err(format!(
                "the server leads on to '{next}', which is no web server"
            )),
        }
    }

    /// Looks at the head of an answer.
    fn look(&self, response: Response) -> Result<Answer, Failure> {
        let status = response.status();
        let wait = answer::retry_after(response.headers());
        let refused = |kind, hint: &str| {
            let message = format!(
                "The requested URL returned error: {}: {hint}",
                status.as_u16()
            );
            failed(kind, message).target(self.name())
        };
        let is_open = self.version.get().is_some();
        Err(match status.as_u16() {
            401 => Failure::Final(refused(
                ErrorKind::PermissionDenied,
                "the server wants to know who asks (options 'username' and 'password-secret')",
            )),
            403 => Failure::Final(refused(
                ErrorKind::PermissionDenied,
                "the server does not let this user read the file",
            )),
            407 => Failure::Final(refused(
                ErrorKind::PermissionDenied,
                "the proxy wants to know who asks (options 'proxy-username' and \
                 'proxy-password-secret')",
            )),
            404 | 410 if is_open => Failure::Final(refused(
                ErrorKind::NotFound,
                "the file is not there any more",
            )),
            404 | 410 => Failure::Final(refused(
                ErrorKind::NotFound,
                "there is no such file on the server",
            )),
            412 => Failure::Final(self.changed("the server does not have that version any more")),
            429 | 503 => Failure::Busy(
                refused(ErrorKind::Io, "the server is busy; try again later"),
                wait,
            ),
            408 | 500 | 502 | 504 => {
                Failure::Passing(refused(ErrorKind::Io, "the server has a failure"), wait)
            }
            200 | 206 | 416 => {
                let content = answer::content(status, response.headers());
                let content = content.map_err(|message| {
                    let error = failed(ErrorKind::Protocol, message);
                    Failure::Passing(error.target(self.name()), None)
                })?;
                return Ok(Answer { response, content });
            }
            _ => Failure::Final(refused(ErrorKind::Protocol, "nothing to read there")),
        })
    }

    /// The file is not what it was when it was opened.
    fn changed(&self, how: &str) -> Error {
        let message =
            format!("the file has changed on the server since it was opened ({how}); open it anew");
        failed(ErrorKind::Io, message).target(self.name())
    }

    /// Reads a range of the version that was opened, and gives the pieces to `take` in order.
    /// A server may send less: then the rest has to be asked for. Each call of `take` says until
    /// when the next bytes must be there.
    pub(crate) async fn read(
        &self,
        range: Range<u64>,
        mut take: impl FnMut(&[u8]) -> Instant,
    ) -> Result<(), Failure> {
        let Answer {
            mut response,
            content,
        } = self.ask(&range).await?;
        let wrong = |message: String| {
            let error = failed(ErrorKind::Protocol, message);
            Failure::Passing(error.target(self.name()), None)
        };
        let version = self.version.get();
        let total = match &content {
            Content::Part { total, .. } | Content::Beyond(total) => Some(*total),
            Content::Whole(total) => *total,
        };
        if let (Some(version), Some(total)) = (version, total)
            && let Some(how) = version.difference(response.headers(), total)
        {
            return Err(Failure::Final(self.changed(&how)));
        }
        let (start, end) = match content {
            Content::Part { start, end, .. } => (start, end),
            Content::Beyond(_) => {
                return Err(wrong("the server refuses a range of the file".to_owned()));
            }
            Content::Whole(_) => {
                let message = "the server sends the whole file in the place of a part of it";
                return Err(wrong(message.to_owned()));
            }
        };
        if start != range.start || end > range.end {
            return Err(wrong(format!(
                "bytes {} to {} were asked for, and the server sends {start} to {end}",
                range.start, range.end
            )));
        }
        let mut left = end - start;
        let mut until = take(&[]);
        while left > 0 {
            let chunk = timeout_at(until, response.chunk()).await;
            let chunk = chunk.map_err(|_| self.too_slow())?;
            let chunk = chunk.map_err(|error| self.broken(&error))?;
            let Some(chunk) = chunk else {
                return Err(wrong(format!("the answer ends {left} bytes too early")));
            };
            if chunk.len() as u64 > left {
                return Err(wrong("the answer is longer than it says".to_owned()));
            }
            left -= chunk.len() as u64;
            until = take(&chunk);
        }
        // Whoever sees the end can use the connection again. What else comes was not asked for.
        let _ = timeout_at(until, response.chunk()).await;
        Ok(())
    }
}

fn unreadable(path: &std::path::Path, error: &std::io::Error) -> Error {
    Error::from_io("open", error).target(path.display().to_string())
}

fn no_pem(path: &std::path::Path, what: &str) -> Error {
    let message = format!("there is no {what} in PEM form in it");
    Error::new(ErrorKind::InvalidArgument, "open", message).target(path.display().to_string())
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

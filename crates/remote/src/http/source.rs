//! Requests to the server: a range of the version that was opened.

use std::fmt;
use std::ops::Range;
use std::sync::OnceLock;
use std::time::Duration;

use parking_lot::Mutex;
use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, HOST, HeaderMap,
    HeaderName, HeaderValue, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE,
    IF_UNMODIFIED_SINCE, LOCATION, PROXY_AUTHORIZATION, RANGE, TRANSFER_ENCODING,
};
use reqwest::{Client, Response, StatusCode, Url};
use tokio::time::{Instant, timeout_at};
use vellum_io::{Error, ErrorKind};

use super::answer::{self, Content, Version};
use super::{Credentials, HttpOptions};
use crate::connection::{Login, Silence};
use crate::failure::{self, Failure, told};

/// How often a server may lead on to another place.
const MOST_REDIRECTS: usize = 10;

/// A file on a server.
pub(crate) struct Source {
    options: HttpOptions,
    url: Url,
    /// What the user wants to be sent beside.
    more: HeaderMap,
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

/// Header fields that are said here: what reads asks for hangs on them, or on what else the user says.
const OWN_FIELDS: &[HeaderName] = &[
    ACCEPT_ENCODING,
    AUTHORIZATION,
    CONNECTION,
    CONTENT_LENGTH,
    COOKIE,
    HOST,
    IF_MATCH,
    IF_MODIFIED_SINCE,
    IF_NONE_MATCH,
    IF_RANGE,
    IF_UNMODIFIED_SINCE,
    PROXY_AUTHORIZATION,
    RANGE,
    TRANSFER_ENCODING,
];

/// The header fields that a user wants to be sent, one a line.
fn parse_header(text: &str) -> Result<HeaderMap, String> {
    let mut fields = HeaderMap::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        // Values may be secret.
        let wrong = || "a header field is 'NAME: VALUE', in a line of its own".to_owned();
        let (name, value) = line.split_once(':').ok_or_else(wrong)?;
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong())?;
        if OWN_FIELDS.contains(&name) {
            return Err(format!(
                "the header field '{name}' is not the user's to say"
            ));
        }
        let mut value = HeaderValue::from_str(value.trim()).map_err(|_| wrong())?;
        value.set_sensitive(true);
        fields.append(name, value);
    }
    Ok(fields)
}

fn value_of(name: &HeaderName, text: &str, secret: bool) -> Result<HeaderValue, Failure> {
    let mut value = HeaderValue::from_str(text).map_err(|_| {
        let message = format!("{name} cannot hold a line end or other control characters");
        Failure::Final(failed(ErrorKind::InvalidArgument, message))
    })?;
    value.set_sensitive(secret);
    Ok(value)
}

impl Source {
    pub(crate) fn new(options: HttpOptions) -> Result<Self, Error> {
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
        let more = parse_header(options.header.as_ref().map_or("", |text| text.as_str()));
        let more = more.map_err(invalid)?;
        Ok(Source {
            options,
            url,
            more,
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
        self.options.connection.timeout
    }

    pub(super) fn options(&self) -> &HttpOptions {
        &self.options
    }

    /// What tells this version from others.
    pub(crate) fn version(&self) -> Option<String> {
        self.version.get()?.tag()
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
        let client = self
            .options
            .connection
            .client(secure, Silence::Client)
            .map_err(Failure::Final)?;
        Ok(place.get_or_init(|| client).clone())
    }

    /// The headers of a request to a place; credentials only to the server that the user named.
    fn headers(&self, place: &Url, range: &Range<u64>) -> Result<HeaderMap, Failure> {
        let mut headers = HeaderMap::new();
        let mut add = |name: HeaderName, text: &str, secret: bool| {
            headers.insert(name.clone(), value_of(&name, text, secret)?);
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
            headers.extend(self.more.clone());
        }
        Ok(headers)
    }

    async fn send(&self, place: &Url, range: &Range<u64>) -> Result<Response, Failure> {
        let mut request = self
            .client(place)?
            .get(place.clone())
            .headers(self.headers(place, range)?);
        if let Some(Credentials::Basic(Login { username, password })) = &self.options.credentials
            && place.origin() == self.url.origin()
        {
            request = request.basic_auth(username, password.as_ref().map(|text| text.as_str()));
        }
        request.send().await.map_err(|error| self.broken(&error))
    }

    pub(super) fn broken(&self, error: &reqwest::Error) -> Failure {
        let text = told(error);
        let io = |message| failed(ErrorKind::Io, message).target(self.name());
        if error.is_timeout() {
            return failure::silent(self.name(), self.timeout());
        }
        match error.is_connect() {
            true => Failure::Unreachable(io(format!("Failed to connect: {text}"))),
            false => Failure::Passing(io(format!("the connection broke: {text}")), None),
        }
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
            "http" if place.scheme() == "http" || !self.options.connection.verify => Ok(next),
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
        failure::changed(self.name(), how)
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
            let chunk = chunk.map_err(|_| failure::too_slow(self.name()))?;
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

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_fields_are_lines_of_names_and_values() {
        let fields = parse_header("X-Token: a b\n\nX-Tenant:c\r\n").unwrap();
        assert_eq!(fields["x-token"], "a b");
        assert_eq!(fields["x-tenant"], "c");
        assert!(parse_header("").unwrap().is_empty());
        for text in [
            "x",
            "a b: c",
            "Range: bytes=0-",
            "Host: h",
            ": x",
            "X: a\u{7}",
        ] {
            assert!(parse_header(text).is_err(), "{text}");
        }
    }
}

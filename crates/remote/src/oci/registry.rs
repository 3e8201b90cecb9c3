//! A registry: what is asked of it, who asks, and where it leads.
//!
//! Invariants:
//! - A login goes to the registry that the user named and to the server of tokens that this one
//!   names, and a token only to the registry: not to servers that keep its bytes for it.
//! - From `https` nobody is led to a server that cannot prove who it is.
//! - Answers that are read into memory are at most [`MOST_ANSWER_BYTES`] long.

use std::time::Duration;

use parking_lot::Mutex;
use reqwest::header::{HeaderMap, LOCATION, USER_AGENT, WWW_AUTHENTICATE};
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode, Url};
use serde_json::Value;
use vellum_io::{Error, ErrorKind, Result};
use zeroize::Zeroizing;

use super::OciOptions;
use super::reference::Reference;
use crate::connection::{Login, Silence};
use crate::failure::{silent, told};
use crate::sending::{Moved, SILENCES};

/// Manifests are some kilobytes long; more than this, none.
const MOST_ANSWER_BYTES: usize = 4 << 20;
const MOST_REDIRECTS: u32 = 5;
/// Some registries want to know what asks.
const PROGRAM: &str = concat!("vellum/", env!("CARGO_PKG_VERSION"));

/// One repository of a registry.
pub(super) struct Registry {
    client: Client,
    /// For what takes long to be sent.
    sender: Client,
    /// How long the registry may be silent.
    timeout: Duration,
    base: Url,
    name: String,
    login: Option<Login>,
    /// What the registry wants to see with each request, once it has said so.
    proof: Mutex<Option<Proof>>,
}

#[derive(Clone)]
enum Proof {
    Login,
    Token(Zeroizing<String>),
}

impl Registry {
    pub(super) fn new(reference: &Reference, options: &OciOptions) -> Result<Registry> {
        let scheme = if options.plain_http { "http" } else { "https" };
        let (host, repository) = (reference.host(), &reference.repository);
        let base = Url::parse(&format!("{scheme}://{host}/v2/{repository}/"));
        let base = base.map_err(|_| {
            let message = format!("'{host}' is no host");
            Error::new(ErrorKind::InvalidArgument, "open", message)
        })?;
        Ok(Registry {
            client: options
                .connection
                .client(!options.plain_http, Silence::Client)?,
            sender: options
                .connection
                .client(!options.plain_http, Silence::Caller)?,
            timeout: options.connection.timeout,
            base,
            name: reference.to_string(),
            login: options.login.clone(),
            proof: Mutex::new(None),
        })
    }

    pub(super) fn error(&self, message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Protocol, "ask registry", message.into()).target(self.name.clone())
    }

    pub(super) fn broken(&self, error: &reqwest::Error) -> Error {
        let text = told(error);
        let message = match error.is_connect() {
            true => format!("Failed to connect: {text}"),
            false => format!("the connection broke: {text}"),
        };
        Error::new(ErrorKind::Io, "ask registry", message).target(self.name.clone())
    }

    /// A place below the repository, or where the registry has led.
    pub(super) fn place(&self, path: &str) -> Result<Url> {
        let joined = self.base.join(path);
        let joined =
            joined.map_err(|_| self.error(format!("'{path}' is no place in a registry")))?;
        self.allowed(joined)
    }

    fn allowed(&self, url: Url) -> Result<Url> {
        match url.scheme() {
            "https" => Ok(url),
            "http" if self.base.scheme() == "http" => Ok(url),
            _ => Err(self.error("the registry leads to a place that is not https")),
        }
    }

    /// Asks, and shows who asks as soon as that is wanted. `request` is made once more then, so
    /// it has no body that can be sent only once unless a request was made before.
    pub(super) async fn ask(
        &self,
        method: Method,
        place: &Url,
        request: impl Fn(RequestBuilder) -> RequestBuilder,
    ) -> Result<Response> {
        self.ask_as(method, place, None, request).await
    }

    /// Puts something there whose body notes what moves: it may take any time.
    pub(super) async fn put(
        &self,
        place: &Url,
        moved: &Moved,
        request: impl Fn(RequestBuilder) -> RequestBuilder,
    ) -> Result<Response> {
        self.ask_as(Method::PUT, place, Some(moved), request).await
    }

    async fn ask_as(
        &self,
        method: Method,
        place: &Url,
        moved: Option<&Moved>,
        request: impl Fn(RequestBuilder) -> RequestBuilder,
    ) -> Result<Response> {
        for attempt in 0..2 {
            let asked = self.follow(method.clone(), place, moved, &request);
            let response = asked.await?;
            // Servers elsewhere that it leads to are shown nothing, whatever they want to know: they could
            // name any server of tokens.
            let is_registry = response.url().origin() == self.base.origin();
            if response.status() != StatusCode::UNAUTHORIZED || attempt > 0 || !is_registry {
                return Ok(response);
            }
            self.answer_challenge(response.headers()).await?;
        }
        Err(self.error("the registry does not say who may ask"))
    }

    /// Sends a request wherever the registry leads it to.
    async fn follow(
        &self,
        method: Method,
        place: &Url,
        moved: Option<&Moved>,
        request: &impl Fn(RequestBuilder) -> RequestBuilder,
    ) -> Result<Response> {
        let mut place = place.clone();
        for _ in 0..=MOST_REDIRECTS {
            let response = self.send(method.clone(), &place, moved, request).await?;
            let reads = method == Method::GET || method == Method::HEAD;
            if !reads || !response.status().is_redirection() {
                return Ok(response);
            }
            let next = location(response.headers()).and_then(|to| place.join(to).ok());
            let next = next.ok_or_else(|| self.error("the registry leads on to no place"))?;
            place = self.allowed(next)?;
        }
        Err(self.error(format!(
            "the registry leads on more than {MOST_REDIRECTS} times"
        )))
    }

    async fn send(
        &self,
        method: Method,
        place: &Url,
        moved: Option<&Moved>,
        request: &impl Fn(RequestBuilder) -> RequestBuilder,
    ) -> Result<Response> {
        let client = match moved {
            Some(_) => &self.sender,
            None => &self.client,
        };
        let built = client.request(method, place.clone());
        let mut built = request(built.header(USER_AGENT, PROGRAM));
        if place.origin() == self.base.origin() {
            let proof = self.proof.lock().clone();
            built = match (proof, &self.login) {
                (Some(Proof::Token(token)), _) => built.bearer_auth(token.as_str()),
                (Some(Proof::Login), Some(login)) => with_login(built, login),
                _ => built,
            };
        }
        let sent = match moved {
            Some(moved) => {
                let silence = SILENCES * self.timeout;
                let sent = moved.answer(silence, built.send()).await;
                sent.ok_or_else(|| silent(&self.name, silence).into_error())?
            }
            None => built.send().await,
        };
        sent.map_err(|error| self.broken(&error))
    }

    /// Does what a refusal asks for: shows the login, or gets a token.
    async fn answer_challenge(&self, headers: &HeaderMap) -> Result<()> {
        let challenge = headers.get(WWW_AUTHENTICATE);
        let challenge = challenge
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default();
        let (scheme, fields) = challenge.split_once(' ').unwrap_or((challenge, ""));
        let proof = match scheme.to_ascii_lowercase().as_str() {
            "basic" if self.login.is_some() => Proof::Login,
            "bearer" => Proof::Token(self.token(&fields_of(fields)).await?),
            _ => {
                return Err(self.error(
                    "the registry wants to know who asks (options --user and --password-secret)",
                ));
            }
        };
        *self.proof.lock() = Some(proof);
        Ok(())
    }

    async fn token(&self, fields: &[(String, String)]) -> Result<Zeroizing<String>> {
        let field = |name: &str| {
            let mut found = fields.iter().filter(|(key, _)| key == name);
            found.next().map(|(_, value)| value.as_str())
        };
        let realm = field("realm").and_then(|realm| Url::parse(realm).ok());
        let realm =
            realm.ok_or_else(|| self.error("the registry does not say where tokens are"))?;
        let mut realm = self.allowed(realm)?;
        for name in ["service", "scope"] {
            if let Some(value) = field(name) {
                realm.query_pairs_mut().append_pair(name, value);
            }
        }
        let mut request = self.client.get(realm);
        if let Some(login) = &self.login {
            request = with_login(request, login);
        }
        let response = request.send().await.map_err(|error| self.broken(&error))?;
        let response = self.good(response).await?;
        let body = Zeroizing::new(self.body(response).await?);
        let value: Value = serde_json::from_slice(&body).unwrap_or_default();
        let token = value["token"].as_str().or(value["access_token"].as_str());
        match token {
            Some(token) => Ok(Zeroizing::new(token.to_owned())),
            None => Err(self.error("the server of tokens gives none")),
        }
    }

    /// An answer that grants what was asked for, or what the registry has against it.
    pub(super) async fn good(&self, response: Response) -> Result<Response> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = self.body(response).await.unwrap_or_default();
        let value: Value = serde_json::from_slice(&body).unwrap_or_default();
        let first = &value["errors"][0];
        let why = first["message"].as_str().or(first["code"].as_str());
        let why = why
            .map(|why| format!(" ({})", printable(why)))
            .unwrap_or_default();
        let message = match status {
            StatusCode::NOT_FOUND => format!("There is no such image in the registry{why}"),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                format!("The registry does not let us (options --user and --password-secret){why}")
            }
            _ => format!("The registry answers {status}{why}"),
        };
        Err(self.error(message))
    }

    /// The whole of a short answer.
    pub(super) async fn body(&self, mut response: Response) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        while let Some(chunk) = response
            .chunk()
            .await
            .map_err(|error| self.broken(&error))?
        {
            if body.len() + chunk.len() > MOST_ANSWER_BYTES {
                return Err(self.error("the registry's answer is too long"));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }
}

fn with_login(request: RequestBuilder, login: &Login) -> RequestBuilder {
    let password = login.password.as_ref().map(|password| password.as_str());
    request.basic_auth(&login.username, password)
}

pub(super) fn location(headers: &HeaderMap) -> Option<&str> {
    headers.get(LOCATION)?.to_str().ok()
}

/// What somebody else says, without what steers a terminal.
fn printable(text: &str) -> String {
    let shown = text.chars().filter(|c| !c.is_control());
    shown.take(200).collect()
}

/// `name="value",name="value"`.
fn fields_of(mut text: &str) -> Vec<(String, String)> {
    let mut fields = Vec::new();
    while let Some((name, rest)) = text.split_once('=') {
        let name = name.trim_matches([' ', ',']).to_ascii_lowercase();
        let (value, rest) = match rest.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => rest.split_once(',').unwrap_or((rest, "")),
        };
        fields.push((name, value.to_owned()));
        text = rest;
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_taken_apart() {
        let fields = fields_of(
            "realm=\"https://a.b/token?x=1\",service=\"r\", Scope=\"repository:a:pull,push\",x=y",
        );
        let expected = [
            ("realm", "https://a.b/token?x=1"),
            ("service", "r"),
            ("scope", "repository:a:pull,push"),
            ("x", "y"),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(fields, expected);
        for text in ["", "=", "a", "a=\"", "a=\"b", ",,=,"] {
            fields_of(text);
        }
    }
}

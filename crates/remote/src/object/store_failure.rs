//! What becomes of a request to an object store that failed.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use object_store::Error as StoreError;
use object_store::client::{HttpError, HttpErrorKind};
use vellum_io::{Error, ErrorKind};

use crate::failure::{self, Failure, told};

/// An answer that says that the request may be made again.
#[derive(Debug)]
pub(super) struct TryAgain {
    pub(super) status: u16,
    pub(super) wait: Option<Duration>,
}

impl fmt::Display for TryAgain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = self.status;
        match self.is_busy() {
            true => write!(f, "the store is busy ({status}); try again later"),
            false => write!(f, "the store has a failure ({status})"),
        }
    }
}

impl StdError for TryAgain {}

impl TryAgain {
    fn is_busy(&self) -> bool {
        matches!(self.status, 429 | 503)
    }
}

/// Nobody has said any keys, and this machine has no role that would give some: why.
#[derive(Debug)]
pub(super) struct NoRole(pub(super) String);

impl fmt::Display for NoRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "no keys are set, and this machine has no role that gives some ({}): set \
             AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the options 'access-key-id' and \
             'access-key-secret', or 'anonymous' for what everybody may read",
            self.0
        )
    }
}

impl StdError for NoRole {}

/// A store that takes nothing of what is sent, or says nothing to it, for so long.
#[derive(Debug)]
pub(super) struct Silent(pub(super) Duration);

impl fmt::Display for Silent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the store has been silent for {:?}", self.0)
    }
}

impl StdError for Silent {}

/// The first error of a type among an error and its causes.
fn find<'a, T: StdError + 'static>(error: &'a (dyn StdError + 'static)) -> Option<&'a T> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

/// What is between the marks of this name in the store's answer.
fn part<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    let (inside, _) = rest.split_once(&format!("</{name}>"))?;
    Some(inside.trim())
}

fn code(text: &str) -> Option<&str> {
    part(text, "Code")
}

/// What the store's answer says, without the XML around it.
fn said(text: &str) -> Option<String> {
    let code = code(text)?;
    // Azure's has the number of the request and the time in more lines.
    let message = part(text, "Message").and_then(|message| message.lines().next());
    Some(match message {
        Some(message) if !message.is_empty() => format!("{code}: {message}"),
        _ => code.to_owned(),
    })
}

/// How long the store had been silent when a request that sends was given up.
pub(super) fn silence(error: &StoreError) -> Option<Duration> {
    find::<Silent>(error).map(|silent| silent.0)
}

/// The store has made nothing of a request since others of that key were under way: whether there is an
/// object is not said by that.
pub(super) fn is_conflict(error: &StoreError) -> bool {
    matches!(error, StoreError::AlreadyExists { .. })
        && matches!(code(&error.to_string()), Some(code) if CONFLICTS.contains(&code))
}

/// Whether a request failed by what the store says, as far as can be seen: it was asked at least.
pub(super) fn has_answered(error: &StoreError) -> bool {
    find::<NoRole>(error).is_none()
}

/// Codes of stores that mean: ask again.
const PASSING: [&str; 3] = ["InternalError", "RequestTimeout", "ServiceUnavailable"];
/// Another request for that key was under way.
const CONFLICTS: [&str; 2] = ["ConditionalRequestConflict", "OperationAborted"];
/// Keys that are not good, which not all stores say by a status that means it.
const BAD_KEYS: [&str; 4] = [
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "InvalidAccessKeyId",
];
/// The time of the request is not that of the store.
const BAD_CLOCK: &str = "RequestTimeTooSkewed";

/// What becomes of a request, by a code of the store's that says more than its status; `said` is added to
/// what it means.
fn by_code(code: &str, name: &str, operation: &'static str, said: &str) -> Option<Failure> {
    let made = |kind, message: String| Error::new(kind, operation, message).target(name);
    Some(match code {
        "SlowDown" => {
            let message = format!("the store is busy{said}; try again later");
            Failure::Busy(made(ErrorKind::Io, message), None)
        }
        code if PASSING.contains(&code) => {
            let message = format!("the store has a failure{said}");
            Failure::Passing(made(ErrorKind::Io, message), None)
        }
        code if CONFLICTS.contains(&code) => {
            let message = format!("others change that object just now{said}; try again later");
            Failure::Passing(made(ErrorKind::Io, message), None)
        }
        BAD_CLOCK => {
            let message = format!(
                "the store does not take the time of this request{said}: set this machine's clock"
            );
            Failure::Final(made(ErrorKind::PermissionDenied, message))
        }
        "NoSuchUpload" => {
            let message = format!("somebody has given this upload up{said}; begin it again");
            Failure::Final(made(ErrorKind::Io, message))
        }
        code if BAD_KEYS.contains(&code) => {
            Failure::Final(made(ErrorKind::PermissionDenied, denied(said)))
        }
        _ => return None,
    })
}

fn denied(said: &str) -> String {
    format!(
        "the store does not let this user do that{said}: check the keys, and that they have not \
         expired"
    )
}

/// An answer to a request for a range that holds something else, in the words of the crate that has
/// read its head.
fn by_range(text: &str, name: &str, operation: &'static str) -> Option<Failure> {
    let made = |message: &str| Error::new(ErrorKind::Protocol, operation, message).target(name);
    if text.contains("Received non-partial response") {
        let message = "the store knows no ranges: it sends the whole object in the place of a part; \
                       copy it to this machine first, with a program of the store's";
        return Some(Failure::Final(made(message)));
    }
    if text.contains("Wanted range starting at") || code(text) == Some("InvalidRange") {
        let how = "it ends before what is to be read";
        return Some(Failure::Final(failure::changed(name, how)));
    }
    let words = ["Content-Range", "CONTENT_RANGE", "Requested "];
    let is_wrong = code(text).is_none() && words.iter().any(|words| text.contains(words));
    is_wrong.then(|| {
        let message = "the store sends other bytes than it was asked for";
        Failure::Passing(made(message), None)
    })
}

/// What a failed request for the object `name` means. `operation`: what it was for.
pub(super) fn failure(
    name: &str,
    timeout: Duration,
    operation: &'static str,
    error: &StoreError,
) -> Failure {
    let made = |kind, message: String| Error::new(kind, operation, message).target(name);
    let io = |message| made(ErrorKind::Io, message);
    if let Some(no_role) = find::<NoRole>(error) {
        let message = no_role.to_string();
        return Failure::Final(made(ErrorKind::PermissionDenied, message));
    }
    if let Some(again) = find::<TryAgain>(error) {
        let failed = io(again.to_string());
        return match again.is_busy() {
            true => Failure::Busy(failed, again.wait),
            false => Failure::Passing(failed, again.wait),
        };
    }
    let text = error.to_string();
    let says = || said(&text).map_or_else(String::new, |said| format!(" ({said})"));
    let by_code = code(&text).and_then(|code| by_code(code, name, operation, &says()));
    if let Some(failure) = by_code {
        return failure;
    }
    match error {
        StoreError::NotFound { .. } => {
            let message = format!("there is no such object, or no such bucket{}", says());
            return Failure::Final(made(ErrorKind::NotFound, message));
        }
        StoreError::Precondition { .. } => {
            let how = "the store does not have that version any more";
            return Failure::Final(failure::changed(name, how));
        }
        StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } => {
            return Failure::Final(made(ErrorKind::PermissionDenied, denied(&says())));
        }
        _ => {}
    }
    if let Some(http) = find::<HttpError>(error) {
        return match http.kind() {
            HttpErrorKind::Connect => {
                Failure::Unreachable(io(format!("Failed to connect: {}", told(http))))
            }
            HttpErrorKind::Timeout => failure::silent(name, silence(error).unwrap_or(timeout)),
            _ => Failure::Passing(io(format!("the connection broke: {}", told(http))), None),
        };
    }
    if let Some(failure) = by_range(&text, name, operation) {
        return failure;
    }
    let message = said(&text).unwrap_or_else(|| told(error));
    Failure::Final(made(ErrorKind::Io, format!("the store refuses: {message}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_told_without_their_xml() {
        let text = "400: <?xml?><Error><Code>ExpiredToken</Code><Message>The token has \
                    expired.</Message></Error>";
        assert_eq!(
            said(text),
            Some("ExpiredToken: The token has expired.".to_owned())
        );
        let text = "404: <?xml?><Error><Code>BlobNotFound</Code><Message>The specified blob does \
                    not exist.\nRequestId:1\nTime:now</Message></Error>";
        assert_eq!(
            said(text),
            Some("BlobNotFound: The specified blob does not exist.".to_owned())
        );
        assert_eq!(said("<Code>X</Code>"), Some("X".to_owned()));
        assert_eq!(said("nothing"), None);
    }

    #[test]
    fn failures_are_told_apart() {
        let timeout = Duration::from_secs(5);
        let generic = |source: Box<dyn StdError + Send + Sync>| StoreError::Generic {
            store: "S3",
            source,
        };
        let told = |error| failure("s3://b/k", timeout, "read", &error);
        let again = |status| {
            let again = TryAgain { status, wait: None };
            generic(Box::new(HttpError::new(HttpErrorKind::Unknown, again)))
        };
        assert!(matches!(told(again(503)), Failure::Busy(..)));
        assert!(matches!(told(again(500)), Failure::Passing(..)));
        let broken = |kind| generic(Box::new(HttpError::new(kind, std::fmt::Error)));
        assert!(matches!(
            told(broken(HttpErrorKind::Connect)),
            Failure::Unreachable(_)
        ));
        assert!(matches!(
            told(broken(HttpErrorKind::Interrupted)),
            Failure::Passing(..)
        ));
        let no_role = NoRole("nobody is there".to_owned());
        let no_role = generic(Box::new(HttpError::new(HttpErrorKind::Connect, no_role)));
        let Failure::Final(error) = told(no_role) else {
            panic!("it would be tried again")
        };
        assert!(error.message().contains("AWS_ACCESS_KEY_ID"));
        assert!(matches!(
            told(generic("<Code>InvalidRange</Code>".into())),
            Failure::Final(error) if error.kind() == ErrorKind::Changed
        ));
        assert!(matches!(
            told(generic("<Code>InvalidPart</Code>".into())),
            Failure::Final(_)
        ));
        assert!(matches!(
            told(generic("<Code>SlowDown</Code>".into())),
            Failure::Busy(..)
        ));
    }
}

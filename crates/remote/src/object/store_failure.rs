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

/// What the store's answer says, without the XML around it.
fn said(text: &str) -> Option<String> {
    let part = |name: &str| {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        let (inside, _) = rest.split_once(&format!("</{name}>"))?;
        Some(inside.trim())
    };
    let code = part("Code")?;
    Some(match part("Message") {
        Some(message) if !message.is_empty() => format!("{code}: {message}"),
        _ => code.to_owned(),
    })
}

/// Whether a request failed by what the store says, as far as can be seen: it was asked at least.
pub(super) fn has_answered(error: &StoreError) -> bool {
    find::<NoRole>(error).is_none()
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
            let message = format!(
                "the store does not let this user do that{}: check the keys, and that they have \
                 not expired",
                says()
            );
            return Failure::Final(made(ErrorKind::PermissionDenied, message));
        }
        _ => {}
    }
    if let Some(http) = find::<HttpError>(error) {
        return match http.kind() {
            HttpErrorKind::Connect => {
                Failure::Unreachable(io(format!("Failed to connect: {}", told(http))))
            }
            HttpErrorKind::Timeout => failure::silent(name, timeout),
            _ => Failure::Passing(io(format!("the connection broke: {}", told(http))), None),
        };
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
            Failure::Final(_)
        ));
    }
}

//! [`Problem`]: why a request is not answered as it was meant, as JSON by RFC 9457.

use serde_json::json;

use crate::qmp::{Class, Failure};

use super::Response;

/// A refusal: its status, and what people and programs are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// HTTP's status.
    pub status: u16,
    /// QMP's class of the error.
    pub class: &'static str,
    /// What is wrong, in QMP's words where it has some.
    pub detail: String,
    /// The methods that there are, of a path that has not this one.
    pub allow: Option<String>,
}

impl Problem {
    /// A refusal that is not QMP's.
    pub(super) fn new(status: u16, detail: impl Into<String>) -> Problem {
        Problem {
            status,
            class: Class::Generic.name(),
            detail: detail.into(),
            allow: None,
        }
    }

    /// The answer that tells it.
    pub(super) fn response(&self) -> Response {
        let body = json!({
            "type": "about:blank",
            "title": title(self.status),
            "status": self.status,
            "detail": self.detail,
            "class": self.class,
        });
        let mut response = Response::new(self.status, "application/problem+json", body.to_string());
        if let Some(allow) = &self.allow {
            response.headers.push(("allow", allow.clone()));
        }
        if self.status == 401 {
            response
                .headers
                .push(("www-authenticate", "Bearer".to_owned()));
        }
        response
    }
}

fn title(status: u16) -> &'static str {
    match status {
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        413 => "Content Too Large",
        415 => "Unsupported Media Type",
        503 => "Service Unavailable",
        _ => "Error",
    }
}

/// What stands in refusals of what is not there; QMP has no class for most of these.
const NOT_FOUND: [&str; 5] = [
    "Cannot find device=",
    "Failed to find node with node-name=",
    "Job not found",
    " is not found",
    "' not found",
];

/// What stands in refusals of what somebody or something is in the way of.
const CONFLICT: [&str; 12] = [
    "Permission conflict on node",
    " is busy",
    "already in use",
    " still in use",
    " is in use",
    "Duplicate nodes",
    "already exists",
    "already running",
    "already shutting down",
    "cannot accept command verb",
    "Need a root block node",
    "Conflicts with use by",
];

impl From<Failure> for Problem {
    fn from(failure: Failure) -> Problem {
        let has = |phrases: &[&str]| phrases.iter().any(|phrase| failure.text.contains(phrase));
        let status = match failure.class {
            Class::CommandNotFound | Class::DeviceNotFound | Class::DeviceNotActive => 404,
            Class::Generic if has(&CONFLICT) => 409,
            Class::Generic if has(&NOT_FOUND) => 404,
            Class::Generic => 400,
        };
        Problem {
            status,
            class: failure.class.name(),
            detail: failure.text,
            allow: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_has_the_status_of_what_it_says() {
        for (class, text, status) in [
            (Class::DeviceNotFound, "Device 'x' not found", 404),
            (Class::DeviceNotActive, "Block job 'x' not found", 404),
            (
                Class::CommandNotFound,
                "The command x has not been found",
                404,
            ),
            (
                Class::Generic,
                "Cannot find device='' nor node-name='x'",
                404,
            ),
            (Class::Generic, "Job not found", 404),
            (Class::Generic, "Export 'e' is not found", 404),
            (
                Class::Generic,
                "Node 'b' is busy: node is used as backing hd of 't'",
                409,
            ),
            (Class::Generic, "Block export id 'e' is already in use", 409),
            (Class::Generic, "export 'e' still in use", 409),
            (
                Class::Generic,
                "Job 'j' in state 'running' cannot accept command verb 'complete'",
                409,
            ),
            (Class::Generic, "Parameter 'size' is missing", 400),
            (Class::Generic, "Block node is read-only", 400),
        ] {
            let problem = Problem::from(Failure::of(class, text));
            assert_eq!((problem.status, &*problem.detail), (status, text));
        }
    }

    #[test]
    fn a_refusal_is_problem_json() {
        let problem = Problem {
            allow: Some("GET".to_owned()),
            ..Problem::new(405, "no")
        };
        let response = problem.response();
        assert_eq!(response.status, 405);
        assert!(response.headers.contains(&("allow", "GET".to_owned())));
        let body: serde_json::Value = serde_json::from_slice(&response.body).unwrap();
        assert_eq!(body["title"], "Method Not Allowed");
        assert_eq!(
            (&body["detail"], &body["class"]),
            (&json!("no"), &json!("GenericError"))
        );
    }
}

//! [`Request`] and [`Response`] of HTTP, as far as anything here looks at them.

/// A request, without what nobody here looks at.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The method, as it was written.
    pub method: String,
    /// The path and the query, as they were written.
    pub target: String,
    /// The header `Host`.
    pub host: Option<String>,
    /// The header `Authorization`.
    pub authorization: Option<Vec<u8>>,
    /// The header `Content-Type`.
    pub content_type: Option<String>,
    /// What follows the headers.
    pub body: Vec<u8>,
}

/// Whether a method asks only.
pub(crate) fn is_read(method: &str) -> bool {
    matches!(method, "GET" | "HEAD")
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
}

impl Response {
    pub(super) fn new(status: u16, content_type: &str, body: impl Into<Vec<u8>>) -> Response {
        let headers = [
            ("content-type", content_type),
            // What is told is true for a moment, and nobody else's.
            ("cache-control", "no-store"),
            ("x-content-type-options", "nosniff"),
            ("cross-origin-resource-policy", "same-origin"),
            ("referrer-policy", "no-referrer"),
        ];
        let headers = headers.map(|(name, value)| (name, value.to_owned()));
        Response {
            status,
            headers: headers.to_vec(),
            body: body.into(),
        }
    }

    pub(super) fn json(text: String) -> Response {
        Response::new(200, "application/json", text)
    }
}

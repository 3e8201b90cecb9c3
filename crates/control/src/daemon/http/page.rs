//! The page for people: one file, which asks for everything else.

use super::Response;

const PAGE: &str = include_str!("index.html");

/// What the page may do: what stands in it, and ask this daemon. Nothing from anywhere else, in no
/// frame of anybody's.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

pub(super) fn response() -> Response {
    let mut response = Response::new(200, "text/html; charset=utf-8", PAGE);
    let policy = ("content-security-policy", POLICY.to_owned());
    response.headers.push(policy);
    response
}

//! The page for people: one file, which asks for everything else.

use std::sync::LazyLock;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use sha2::{Digest, Sha256};

use super::Response;

const PAGE: &str = include_str!("index.html");

/// What the page may do: what stands in it, and ask this daemon. Nothing from anywhere else, in no
/// frame of anybody's. No other script and no other style does anything, even if somebody got one into it.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    format!(
        "default-src 'none'; style-src '{}'; script-src '{}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        digest("<style>", "</style>"),
        digest("<script>", "</script>"),
    )
});

/// Names what stands in the page between two tags, as a policy does.
fn digest(begin: &str, end: &str) -> String {
    let (_, rest) = PAGE.split_once(begin).expect("the page has one");
    let (inside, _) = rest.split_once(end).expect("it ends");
    let digest = Sha256::digest(inside.as_bytes());
    format!("sha256-{}", BASE64_STANDARD.encode(digest))
}

pub(super) fn response() -> Response {
    let mut response = Response::new(200, "text/html; charset=utf-8", PAGE);
    let policy = ("content-security-policy", POLICY.clone());
    response.headers.push(policy);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_names_all_that_stands_in_the_page() {
        for tag in ["<style", "<script"] {
            assert_eq!(PAGE.matches(tag).count(), 1, "{tag}");
        }
        assert_eq!(POLICY.matches("'sha256-").count(), 2);
        assert!(!POLICY.contains("unsafe"));
        // Those that no digest is for.
        for attribute in [" style=", " onclick=", " onload=", "javascript:"] {
            assert!(!PAGE.contains(attribute), "{attribute}");
        }
    }
}

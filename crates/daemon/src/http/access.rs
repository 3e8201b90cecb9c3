//! [`Access`]: who may ask for what, over which socket.
//!
//! Invariants:
//! - Where there is a token, nothing but the page itself is given away without it.
//! - Over TCP without a token nothing is changed: whoever may open a page on this machine could
//!   otherwise have a browser send requests.
//! - Over TCP on this machine a request names this machine: a name that leads here for a moment
//!   (DNS rebinding) is not believed.

use std::fmt;
use std::net::IpAddr;

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use super::problem::Problem;
use super::{Request, is_read};

/// Shorter tokens can be guessed.
const MIN_TOKEN_BYTES: usize = 16;

/// A secret that requests carry.
#[derive(Clone)]
pub(super) struct Token(Zeroizing<Vec<u8>>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// The token in a secret; the end of a line behind it does not count.
    ///
    /// # Errors
    /// If it is too short, or cannot stand in a request.
    pub(super) fn new(secret: &[u8]) -> Result<Token, String> {
        let token = secret.trim_ascii_end();
        if token.len() < MIN_TOKEN_BYTES {
            return Err(format!(
                "a token has {MIN_TOKEN_BYTES} letters or more; `openssl rand -hex 32` makes one"
            ));
        }
        match token.iter().all(u8::is_ascii_graphic) {
            true => Ok(Token(Zeroizing::new(token.to_vec()))),
            false => Err("a token has ASCII letters, digits and marks only".to_owned()),
        }
    }

    /// Whether what a request carries is this; that takes as long whatever it is.
    fn is(&self, carried: &[u8]) -> bool {
        self.0.as_slice().ct_eq(carried).into()
    }
}

/// How requests come in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Over a unix socket: its mode says who may.
    Unix,
    /// Over TCP, on this machine only.
    Loopback,
    /// Over TCP and TLS, from anywhere.
    Anywhere,
}

/// What those who come over one socket may.
#[derive(Debug, Clone)]
pub(super) struct Access {
    pub(super) way: Way,
    pub(super) token: Option<Token>,
}

impl Access {
    /// Looks at a request before anything else is done with it.
    ///
    /// # Errors
    /// The refusal.
    pub(super) fn check(&self, request: &Request) -> Result<(), Problem> {
        if self.way == Way::Loopback && !request.host.as_deref().is_some_and(is_loopback) {
            let detail = "The header Host names another machine: ask for localhost";
            return Err(Problem::new(403, detail));
        }
        let is_page = is_read(&request.method) && request.target == "/";
        match &self.token {
            Some(_) if is_page => Ok(()),
            Some(token) => match request.authorization.as_deref().and_then(bearer) {
                Some(carried) if token.is(carried) => Ok(()),
                Some(_) => Err(Problem::new(401, "The token is another one")),
                None => {
                    let detail = "A token is needed: Authorization: Bearer TOKEN";
                    Err(Problem::new(401, detail))
                }
            },
            None if self.way != Way::Unix && !is_read(&request.method) => {
                let detail = "Changes over TCP need a token: start the daemon with \
                              --metrics ADDRESS,token-secret=ID, or use a unix socket";
                Err(Problem::new(403, detail))
            }
            None => Ok(()),
        }
    }
}

/// What follows `Bearer`.
fn bearer(header: &[u8]) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"bearer ";
    let (scheme, token) = header.split_at_checked(SCHEME.len())?;
    scheme
        .eq_ignore_ascii_case(SCHEME)
        .then(|| token.trim_ascii())
}

/// Whether a header `Host` names this machine.
fn is_loopback(host: &str) -> bool {
    let is_port = |port: &str| port.parse::<u16>().is_ok();
    let name = match host.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((name, "")) => name,
            Some((name, port)) if port.strip_prefix(':').is_some_and(is_port) => name,
            _ => return false,
        },
        None => match host.split_once(':') {
            Some((name, port)) if is_port(port) => name,
            Some(_) => return false,
            None => host,
        },
    };
    name.eq_ignore_ascii_case("localhost")
        || name
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0123456789abcdef";

    fn access(way: Way, token: Option<&str>) -> Access {
        let token = token.map(|token| Token::new(token.as_bytes()).unwrap());
        Access { way, token }
    }

    fn status(access: &Access, method: &str, target: &str, token: Option<&str>) -> u16 {
        let request = Request {
            method: method.to_owned(),
            target: target.to_owned(),
            host: Some("localhost:9100".to_owned()),
            authorization: token.map(|token| format!("Bearer {token}").into_bytes()),
            ..Request::default()
        };
        access
            .check(&request)
            .err()
            .map_or(200, |problem| problem.status)
    }

    #[test]
    fn a_token_is_asked_for_everywhere_but_on_the_page() {
        for way in [Way::Unix, Way::Loopback, Way::Anywhere] {
            let access = access(way, Some(&format!("{TOKEN}\n")));
            for (method, target) in [("GET", "/v1/disks"), ("POST", "/v1/nodes"), ("POST", "/")] {
                assert_eq!(status(&access, method, target, None), 401);
                assert_eq!(status(&access, method, target, Some("")), 401);
                assert_eq!(status(&access, method, target, Some(&TOKEN[1..])), 401);
                assert_eq!(status(&access, method, target, Some(TOKEN)), 200);
            }
            assert_eq!(status(&access, "GET", "/", None), 200);
        }
    }

    #[test]
    fn without_a_token_tcp_only_reads() {
        let tcp = access(Way::Loopback, None);
        assert_eq!(status(&tcp, "GET", "/v1/disks", None), 200);
        assert_eq!(status(&tcp, "HEAD", "/metrics", None), 200);
        for method in ["POST", "DELETE", "PUT", "OPTIONS", "get"] {
            assert_eq!(status(&tcp, method, "/v1/disks", None), 403, "{method}");
        }
        assert_eq!(
            status(&access(Way::Unix, None), "POST", "/v1/nodes", None),
            200
        );
    }

    #[test]
    fn names_of_this_machine_are_known() {
        for host in [
            "localhost",
            "LOCALHOST:80",
            "127.0.0.1:9100",
            "127.1.2.3",
            "[::1]",
            "[::1]:1",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "",
            "example.org",
            "localhost.example.org",
            "127.0.0.1.nip.io:80",
            "localhost:",
            "localhost:80:80",
            "localhost@evil",
            "[::1",
            "[::1]x",
            "::1",
            "0.0.0.0",
            "10.0.0.1",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn tokens_that_could_be_guessed_or_not_be_sent_are_refused() {
        assert!(Token::new(b"short").is_err());
        assert!(Token::new(b"").is_err());
        assert!(Token::new("0123456789abcdé0".as_bytes()).is_err());
        assert!(Token::new(b"0123456789 abcdef").is_err());
        assert!(Token::new(b"0123456789abcdef\r\n").is_ok());
    }
}

//! [`Address`]: where a daemon listens.

use std::path::PathBuf;

/// See the module's head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A host and a port.
    Tcp(String),
    /// A host and a port, where the daemon proves with TLS that it is the one.
    Tls(String),
}

impl Address {
    /// Understands `unix:PATH`, `HOST:PORT` or `https://HOST:PORT`.
    ///
    /// # Errors
    /// What a person should read.
    pub fn parse(text: &str) -> Result<Address, String> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Address::Unix(path.into()));
        }
        let is_place = |place: &str| {
            place.rsplit_once(':').is_some_and(|(host, port)| {
                !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok()
            })
        };
        let secured = text.strip_prefix("https://");
        let place = secured.map_or(text, |place| place.strip_suffix('/').unwrap_or(place));
        match (is_place(place), secured) {
            (true, Some(_)) => Ok(Address::Tls(place.to_owned())),
            (true, None) => Ok(Address::Tcp(place.to_owned())),
            (false, _) => Err(format!(
                "'{text}' is neither unix:PATH nor HOST:PORT nor https://HOST:PORT"
            )),
        }
    }

    /// What a request names as its host.
    pub fn host(&self) -> &str {
        match self {
            Address::Unix(_) => "localhost",
            Address::Tcp(place) | Address::Tls(place) => place,
        }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(place) => f.write_str(place),
            Address::Tls(place) => write!(f, "https://{place}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_and_ports_are_addresses() {
        let unix = Address::Unix("/run/v.sock".into());
        assert_eq!(Address::parse("unix:/run/v.sock"), Ok(unix));
        for text in ["localhost:9100", "[::1]:80"] {
            assert_eq!(Address::parse(text), Ok(Address::Tcp(text.to_owned())));
            for secured in [format!("https://{text}"), format!("https://{text}/")] {
                assert_eq!(Address::parse(&secured), Ok(Address::Tls(text.to_owned())));
            }
        }
        for text in [
            "",
            "unix:",
            "localhost",
            ":80",
            "localhost:http",
            "/run/v.sock",
            "https://localhost",
            "https://localhost:9100/v1",
            "http://localhost:9100",
        ] {
            assert!(Address::parse(text).is_err(), "{text}");
        }
    }
}

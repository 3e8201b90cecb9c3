//! [`Address`]: where a daemon listens.

use std::path::PathBuf;

/// See the module's head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A host and a port.
    Tcp(String),
}

impl Address {
    /// Understands `unix:PATH` or `HOST:PORT`.
    ///
    /// # Errors
    /// What a person should read.
    pub fn parse(text: &str) -> Result<Address, String> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Address::Unix(path.into()));
        }
        let place = text.rsplit_once(':');
        let is_place = |(host, port): (&str, &str)| !host.is_empty() && port.parse::<u16>().is_ok();
        match place.is_some_and(is_place) {
            true => Ok(Address::Tcp(text.to_owned())),
            false => Err(format!("'{text}' is neither unix:PATH nor HOST:PORT")),
        }
    }

    /// What a request names as its host.
    pub fn host(&self) -> &str {
        match self {
            Address::Unix(_) => "localhost",
            Address::Tcp(place) => place,
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
        }
        for text in [
            "",
            "unix:",
            "localhost",
            ":80",
            "localhost:http",
            "/run/v.sock",
        ] {
            assert!(Address::parse(text).is_err(), "{text}");
        }
    }
}

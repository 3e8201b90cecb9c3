//! [`InetAddress`]: a host and a port as QEMU's `InetSocketAddress` has them.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};

use vellum_options::{Options, error_text};

use crate::failure::{Failure, failure, message};
use crate::qmp::{self, Arguments};

/// Why a name is not resolved that nobody knows.
pub(super) const NO_NAME: &str = "Name or service not known";

/// What is said of a last port that is none.
const NO_PORT: &str = "Parameter 'to' expects uint16_t";

/// Where something listens on a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InetAddress {
    /// A name, or an address; empty for all addresses of the machine.
    pub host: String,
    /// A number as text.
    pub port: String,
    /// The host is an address, and no name is looked up.
    pub numeric: bool,
    /// Who listens tries the ports up to this one.
    pub last_port: Option<u16>,
    /// Whether addresses of IPv4 are wanted, and those of IPv6.
    pub families: (Option<bool>, Option<bool>),
    /// Whoever connects has the kernel ask whether the other side is still there.
    pub keep_alive: bool,
}

impl InetAddress {
    /// A host and a port, with nothing else said.
    pub fn new(host: impl Into<String>, port: impl Into<String>) -> Self {
        InetAddress {
            host: host.into(),
            port: port.into(),
            numeric: false,
            last_port: None,
            families: (None, None),
            keep_alive: false,
        }
    }

    /// Takes the options of an address, of which `name` is the group.
    pub(super) fn take(options: &mut Options, name: &str) -> Result<Self, Failure> {
        let mut part = |key: &str| {
            let value = options.take_text(key).map_err(failure)?;
            value.ok_or_else(|| message(format!("Parameter '{name}.{key}' is missing")))
        };
        let (host, port) = (part("host")?, part("port")?);
        let last_port = options.take_number("to");
        let last_port = last_port.map_err(|_| message(NO_PORT))?;
        let mut switch = |key: &str| options.take_bool(key).map_err(failure);
        // Without it a connection is the same, and the other side need not know it.
        switch("mptcp")?;
        Ok(InetAddress {
            host,
            port,
            numeric: switch("numeric")? == Some(true),
            last_port: last_port.map(port_of).transpose().map_err(message)?,
            families: (switch("ipv4")?, switch("ipv6")?),
            keep_alive: switch("keep-alive")? == Some(true),
        })
    }

    /// Takes the arguments of a command.
    pub(super) fn from_arguments(arguments: &mut Arguments) -> Result<Self, qmp::Failure> {
        let (host, port) = (arguments.need_text("host")?, arguments.need_text("port")?);
        let last_port = arguments.number("to")?.map(port_of).transpose();
        arguments.switch("mptcp")?;
        Ok(InetAddress {
            host,
            port,
            numeric: arguments.switch("numeric")? == Some(true),
            last_port: last_port.map_err(qmp::Failure::new)?,
            families: (arguments.switch("ipv4")?, arguments.switch("ipv6")?),
            keep_alive: arguments.switch("keep-alive")? == Some(true),
        })
    }

    /// The number of the port.
    pub(super) fn port_number(&self) -> Result<u16, Failure> {
        let text = if self.port.is_empty() {
            "0"
        } else {
            &self.port
        };
        text.parse().map_err(|_| match self.numeric {
            true => self.not_resolved(NO_NAME),
            false => self.not_resolved("Servname not supported for ai_socktype"),
        })
    }

    /// What it stands for.
    ///
    /// # Errors
    /// In QEMU's words.
    pub fn resolve(&self) -> Result<Vec<SocketAddr>, Failure> {
        let (ipv4, ipv6) = self.families;
        if (ipv4, ipv6) == (Some(false), Some(false)) {
            return Err(message("Cannot disable IPv4 and IPv6 at same time"));
        }
        let port = self.port_number()?;
        let wants_v4 = ipv4.unwrap_or(ipv6 != Some(true));
        let wants_v6 = ipv6.unwrap_or(ipv4 != Some(true));
        let is_wanted = |address: &SocketAddr| match address {
            SocketAddr::V4(_) => wants_v4,
            SocketAddr::V6(_) => wants_v6,
        };
        let all: Vec<SocketAddr> = if self.host.is_empty() {
            vec![
                (Ipv4Addr::UNSPECIFIED, port).into(),
                (Ipv6Addr::UNSPECIFIED, port).into(),
            ]
        } else if let Ok(address) = self.host.parse() {
            let address = SocketAddr::new(address, port);
            if !is_wanted(&address) {
                return Err(self.not_resolved("Address family for hostname not supported"));
            }
            vec![address]
        } else if self.numeric {
            return Err(self.not_resolved(NO_NAME));
        } else {
            let found = (&*self.host, port).to_socket_addrs();
            let found = found.map_err(|error| {
                let text = error.to_string();
                self.not_resolved(text.rsplit(": ").next().unwrap_or_default())
            })?;
            found.collect()
        };
        let wanted: Vec<_> = all.into_iter().filter(is_wanted).collect();
        match wanted.is_empty() {
            true => Err(self.not_resolved(NO_NAME)),
            false => Ok(wanted),
        }
    }

    /// Where to try to listen, the first choice first.
    ///
    /// # Errors
    /// As [`InetAddress::resolve`]; and if the last port is below the first.
    pub fn to_listen_at(&self) -> Result<Vec<SocketAddr>, Failure> {
        let first = self.port_number()?;
        let last = self.last_port.unwrap_or(first);
        if last < first {
            return Err(message(format!(
                "Failed to create a socket: there is no port from {first} to {last}"
            )));
        }
        let addresses = self.resolve()?.into_iter();
        let of = |address: SocketAddr| {
            (first..=last).map(move |port| SocketAddr::new(address.ip(), port))
        };
        Ok(addresses.flat_map(of).collect())
    }

    pub(super) fn not_resolved(&self, why: &str) -> Failure {
        let InetAddress { host, port, .. } = self;
        message(format!(
            "address resolution failed for {host}:{port}: {why}"
        ))
    }
}

/// A port that a number is.
pub(super) fn port_of(number: impl TryInto<u16>) -> Result<u16, String> {
    let port = number.try_into();
    port.map_err(|_| NO_PORT.to_owned())
}

/// Why nothing listens.
pub fn bind_failure(error: &vellum::Error) -> Failure {
    let text = error_text(error);
    match error.errno() {
        libc::EADDRINUSE => message(format!("Failed to find an available port: {text}")),
        _ => message(format!("Failed to bind socket: {text}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> Result<InetAddress, String> {
        let mut options = Options::parse(text).unwrap();
        let taken = InetAddress::take(&mut options, "addr").map_err(|failure| failure.0);
        assert!(options.is_empty(), "{text}");
        taken
    }

    fn listening(text: &str) -> Result<String, String> {
        let addresses = address(text)?.to_listen_at();
        let addresses = addresses.map_err(|failure| failure.0)?;
        let texts: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
        Ok(texts.join(" "))
    }

    #[test]
    fn families_and_ports_choose_addresses() {
        for (text, expected) in [
            ("host=127.0.0.1,port=5", "127.0.0.1:5"),
            (
                "host=127.0.0.1,port=5,ipv4=on,ipv6=on,mptcp=on",
                "127.0.0.1:5",
            ),
            ("host=::1,port=5,ipv6=on,keep-alive=on", "[::1]:5"),
            ("host=,port=5", "0.0.0.0:5 [::]:5"),
            ("host=,port=5,ipv4=off", "[::]:5"),
            ("host=,port=", "0.0.0.0:0 [::]:0"),
            ("host=::1,port=5,to=7,numeric=on", "[::1]:5 [::1]:6 [::1]:7"),
            ("host=::1,port=65534,to=65535", "[::1]:65534 [::1]:65535"),
        ] {
            assert_eq!(listening(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused_in_qemus_words() {
        for (text, why) in [
            ("host=h", "Parameter 'addr.port' is missing"),
            ("host=,port=5,to=65536", "Parameter 'to' expects uint16_t"),
            (
                "host=,port=5,ipv4=off,ipv6=off",
                "Cannot disable IPv4 and IPv6 at same time",
            ),
            (
                "host=::1,port=5,ipv4=on",
                "address resolution failed for ::1:5: Address family for hostname not supported",
            ),
            (
                "host=localhost,port=5,numeric=on",
                "address resolution failed for localhost:5: Name or service not known",
            ),
            (
                "host=::1,port=x",
                "address resolution failed for ::1:x: Servname not supported for ai_socktype",
            ),
            (
                "host=::1,port=5,to=4",
                "Failed to create a socket: there is no port from 5 to 4",
            ),
        ] {
            let taken = match address(text) {
                Ok(_) => listening(text),
                Err(failure) => Err(failure),
            };
            assert_eq!(taken.unwrap_err(), why, "{text}");
        }
    }
}

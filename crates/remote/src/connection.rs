//! Connections to servers: what users say of them, and the client that makes them.

use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::time::Duration;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{Certificate, Client, Identity, NoProxy, Proxy, redirect};
use vellum_io::{Error, ErrorKind};
use zeroize::Zeroizing;

use crate::blocking;
use crate::failure::told;

/// A connection that was not used for so long may be closed on its way: servers keep them for
/// 60 seconds and more.
const IDLE_LIMIT: Duration = Duration::from_secs(30);

/// A name and a password. Its debug output tells neither.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// The name.
    pub username: String,
    /// The password.
    pub password: Option<Zeroizing<String>>,
}

impl std::fmt::Debug for Login {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Login")
    }
}

/// How a server is spoken to. The default has the times of QEMU's driver.
#[derive(Debug, Clone)]
pub struct ConnectionOptions {
    /// How long the server may be silent before a connection is given up. Opening fails after
    /// this time, a read after six times as long without a block.
    pub timeout: Duration,
    /// Who asks the proxy that the environment names.
    pub proxy_login: Option<Login>,
    /// The server has to prove who it is.
    pub verify: bool,
    /// Certificates (PEM) that are trusted beside the system's.
    pub authorities: Option<PathBuf>,
    /// The certificate (PEM) that shows the server who asks, and its key, which may lie in one file.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

impl Default for ConnectionOptions {
    fn default() -> Self {
        ConnectionOptions {
            timeout: Duration::from_secs(5),
            proxy_login: None,
            verify: true,
            authorities: None,
            certificate: None,
        }
    }
}

/// Looks names of hosts up on a thread of its own. The client's own resolver uses the runtime's pool, see
/// [`crate::blocking`].
struct Resolver;

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let found = blocking::run_io(move || (name.as_str(), 0).to_socket_addrs());
        Box::pin(async move {
            let found: Addrs = Box::new(found.await?);
            Ok(found)
        })
    }
}

/// Who notices that a server is silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Silence {
    /// The client, which counts from the beginning of a request: for those without a long body.
    Client,
    /// Whoever makes the request.
    #[cfg(any(feature = "oci", feature = "s3"))]
    Caller,
}

impl ConnectionOptions {
    /// A client for servers with TLS (`secure`), or for those without.
    pub(crate) fn client(&self, secure: bool, silence: Silence) -> Result<Client, Error> {
        // Whatever the program has chosen already is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let timeout = self.timeout;
        let mut builder = Client::builder()
            .redirect(redirect::Policy::none())
            .http1_only()
            .referer(false)
            .connect_timeout(timeout)
            .dns_resolver(Resolver)
            .pool_idle_timeout(IDLE_LIMIT);
        if silence == Silence::Client {
            builder = builder.read_timeout(timeout);
        }
        if secure && self.verify {
            builder = builder.tls_certs_merge(self.authorities()?);
        } else {
            // Of connections in the clear nothing is verified: so the system's certificates
            // are not read for them.
            builder = builder.tls_danger_accept_invalid_certs(true);
        }
        if let Some(identity) = self.identity()?.filter(|_| secure) {
            builder = builder.identity(identity);
        }
        for proxy in self.proxies()? {
            builder = builder.proxy(proxy);
        }
        builder.build().map_err(|error| {
            let message = format!("cannot set up connections: {}", told(&error));
            Error::new(ErrorKind::InvalidArgument, "open", message)
        })
    }

    fn authorities(&self) -> Result<Vec<Certificate>, Error> {
        let Some(path) = &self.authorities else {
            return Ok(Vec::new());
        };
        let bytes = std::fs::read(path).map_err(|error| unreadable(path, &error))?;
        let found = Certificate::from_pem_bundle(&bytes).unwrap_or_default();
        if found.is_empty() {
            return Err(no_pem(path, "certificate"));
        }
        Ok(found)
    }

    fn identity(&self) -> Result<Option<Identity>, Error> {
        let Some((certificate, key)) = &self.certificate else {
            return Ok(None);
        };
        let mut pem =
            vellum_storage::secret::read_file(key).map_err(|error| unreadable(key, &error))?;
        if certificate != key {
            let more =
                std::fs::read(certificate).map_err(|error| unreadable(certificate, &error))?;
            pem.push(b'\n');
            pem.extend_from_slice(&more);
        }
        let identity = Identity::from_pem(&pem);
        identity
            .map(Some)
            .map_err(|_| no_pem(key, "certificate with its key"))
    }

    /// The proxies of the environment, where a name and a password are to be shown to them.
    /// Without these the client looks for them itself.
    fn proxies(&self) -> Result<Vec<Proxy>, Error> {
        let Some(Login { username, password }) = &self.proxy_login else {
            return Ok(Vec::new());
        };
        let password = password.as_ref().map_or("", |password| password.as_str());
        let named = |names: &[&str]| {
            let found = names.iter().find_map(|name| std::env::var(name).ok());
            found.filter(|url| !url.is_empty())
        };
        let mut proxies = Vec::new();
        let add = |proxy: reqwest::Result<Proxy>| {
            let proxy = proxy.map_err(|error| {
                let message = format!("the proxy that the environment names: {}", told(&error));
                Error::new(ErrorKind::InvalidArgument, "open", message)
            })?;
            let proxy = proxy.basic_auth(username, password);
            Ok::<_, Error>(proxy.no_proxy(NoProxy::from_env()))
        };
        if let Some(url) = named(&["http_proxy"]) {
            proxies.push(add(Proxy::http(url))?);
        }
        if let Some(url) = named(&["https_proxy", "HTTPS_PROXY"]) {
            proxies.push(add(Proxy::https(url))?);
        }
        if let Some(url) = named(&["all_proxy", "ALL_PROXY"]) {
            proxies.push(add(Proxy::all(url))?);
        }
        Ok(proxies)
    }
}

fn unreadable(path: &std::path::Path, error: &std::io::Error) -> Error {
    Error::from_io("open", error).target(path.display().to_string())
}

fn no_pem(path: &std::path::Path, what: &str) -> Error {
    let message = format!("there is no {what} in PEM form in it");
    Error::new(ErrorKind::InvalidArgument, "open", message).target(path.display().to_string())
}

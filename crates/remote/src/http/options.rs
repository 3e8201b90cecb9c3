//! What a user says of a file on a web server.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use zeroize::Zeroizing;

/// Who asks: a name with a password, or a token. Its debug output tells neither.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    /// HTTP's basic authentication.
    Basic {
        /// The name.
        username: String,
        /// The password.
        password: Option<Zeroizing<String>>,
    },
    /// A token (`Authorization: Bearer`).
    Bearer(Zeroizing<String>),
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}

/// How a file on a web server is opened. [`HttpOptions::new`] has QEMU's defaults.
#[derive(Clone)]
pub struct HttpOptions {
    /// Where it is: `http://…` or `https://…`.
    pub url: String,
    /// Bytes that are fetched ahead of a reader that has begun to read on, at first: more the more it
    /// reads, up to 64 times as much or 16 MiB. 0: none.
    pub readahead_bytes: u64,
    /// How long the server may be silent before a connection is given up. Opening fails after
    /// this time, a read after six times as long without a block.
    pub timeout: Duration,
    /// Who asks the server.
    pub credentials: Option<Credentials>,
    /// Who asks the proxy that the environment names.
    pub proxy_credentials: Option<Credentials>,
    /// Cookies: `name=content; ...`.
    pub cookie: Option<Zeroizing<String>>,
    /// The server has to prove who it is.
    pub verify: bool,
    /// Certificates (PEM) that are trusted beside the system's.
    pub authorities: Option<PathBuf>,
    /// The certificate (PEM) that shows the server who asks, and its key, which may lie in one file.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// Gets a line for the user: what takes long, and why.
    pub notice: fn(&str),
}

impl HttpOptions {
    /// A file, with the defaults of QEMU's driver.
    pub fn new(url: impl Into<String>) -> Self {
        HttpOptions {
            url: url.into(),
            readahead_bytes: 256 << 10,
            timeout: Duration::from_secs(5),
            credentials: None,
            proxy_credentials: None,
            cookie: None,
            verify: true,
            authorities: None,
            certificate: None,
            notice: |_| {},
        }
    }
}

impl fmt::Debug for HttpOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("HttpOptions");
        shown.field("readahead_bytes", &self.readahead_bytes);
        shown.field("timeout", &self.timeout);
        shown.field("verify", &self.verify).finish_non_exhaustive()
    }
}

//! What a user says of a file on a web server.

use std::fmt;

use zeroize::Zeroizing;

use crate::connection::{ConnectionOptions, Login};

/// Who asks: a name with a password, or a token. Its debug output tells neither.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    /// HTTP's basic authentication.
    Basic(Login),
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
    /// Bytes of blocks that are kept in memory: at most 64 MiB, at least 2 MiB.
    pub keep_bytes: u64,
    /// How the server is spoken to.
    pub connection: ConnectionOptions,
    /// Who asks the server.
    pub credentials: Option<Credentials>,
    /// Cookies: `name=content; ...`.
    pub cookie: Option<Zeroizing<String>>,
    /// More header fields of each request to the server that the URL names: `NAME: VALUE` in a line each.
    pub header: Option<Zeroizing<String>>,
    /// Gets a line for the user: what takes long, and why.
    pub notice: fn(&str),
}

impl HttpOptions {
    /// A file, with the defaults of QEMU's driver.
    pub fn new(url: impl Into<String>) -> Self {
        HttpOptions {
            url: url.into(),
            readahead_bytes: 256 << 10,
            keep_bytes: crate::fetch::MOST_KEPT_BYTES,
            connection: ConnectionOptions::default(),
            credentials: None,
            cookie: None,
            header: None,
            notice: |_| {},
        }
    }
}

impl fmt::Debug for HttpOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("HttpOptions");
        shown.field("readahead_bytes", &self.readahead_bytes);
        shown.field("connection", &self.connection);
        shown.finish_non_exhaustive()
    }
}

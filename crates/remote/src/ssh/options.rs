//! Which file on which machine, and whom to believe.

use std::time::Duration;

/// What the hash of a key is made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HashKind {
    /// MD5.
    Md5,
    /// SHA-1.
    Sha1,
    /// SHA-256.
    Sha256,
}

/// How a machine shows that it is the one that is meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostKeyCheck {
    /// It need not.
    None,
    /// Its key is among those that `ssh` knows.
    KnownHosts,
    /// Its key has this hash: hexadecimal digits, maybe with colons between them.
    Hash(HashKind, String),
}

/// A file on another machine.
#[derive(Debug, Clone)]
pub struct SshOptions {
    /// The name for messages.
    pub name: String,
    /// The machine: a name, an address, or what stands in the configuration of `ssh`.
    pub host: String,
    /// Its port; without: what the configuration says.
    pub port: Option<u16>,
    /// Who asks; without: what the configuration says.
    pub user: Option<String>,
    /// The file there.
    pub path: String,
    /// How the machine shows that it is the one that is meant.
    pub host_key_check: HostKeyCheck,
    /// How long connecting may take, and how long the server may be silent while somebody waits.
    pub timeout: Duration,
    /// Writes are wanted.
    pub writable: bool,
    /// The file is made, or emptied if it is there.
    pub create: bool,
    /// Takes what users are to know.
    pub notice: fn(&str),
}

impl SshOptions {
    /// A file with default options, to be read.
    pub fn new(host: impl Into<String>, path: impl Into<String>) -> Self {
        let (host, path) = (host.into(), path.into());
        SshOptions {
            name: format!("ssh://{host}{path}"),
            host,
            port: None,
            user: None,
            path,
            host_key_check: HostKeyCheck::KnownHosts,
            timeout: Duration::from_secs(30),
            writable: false,
            create: false,
            notice: |_| {},
        }
    }
}

//! Which image on which cluster, and how it is reached.

use zeroize::Zeroizing;

/// How librbd has encrypted an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EncryptionFormat {
    /// LUKS, version 1.
    Luks1,
    /// LUKS, version 2.
    Luks2,
}

/// An image that librbd decrypts.
#[derive(Clone, PartialEq, Eq)]
pub struct Encryption {
    /// What it is encrypted with.
    pub format: EncryptionFormat,
    /// Its passphrase.
    pub passphrase: Zeroizing<Vec<u8>>,
}

impl std::fmt::Debug for Encryption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Encryption({:?})", self.format)
    }
}

/// An image of a Ceph cluster.
#[derive(Clone)]
pub struct RbdOptions {
    /// The name for messages.
    pub name: String,
    /// The pool.
    pub pool: String,
    /// The namespace in it, if it is not the nameless one.
    pub namespace: Option<String>,
    /// The image.
    pub image: String,
    /// A snapshot of it.
    pub snapshot: Option<String>,
    /// Ceph's configuration file; without: where Ceph looks for it.
    pub conf: Option<String>,
    /// Who asks, without `client.`.
    pub user: Option<String>,
    /// The monitors, as `HOST:PORT`; without: those of the configuration.
    pub monitors: Vec<String>,
    /// The key of who asks, in base64.
    pub key: Option<Zeroizing<String>>,
    /// How it is shown who asks: `cephx`, `none`.
    pub authentication: Vec<String>,
    /// More of Ceph's own options.
    pub more: Vec<(String, String)>,
    /// librbd keeps what is written until a flush.
    pub cached: bool,
    /// Writes are wanted.
    pub writable: bool,
    /// librbd decrypts it.
    pub encryption: Option<Encryption>,
}

impl RbdOptions {
    /// An image with default options, to be read.
    pub fn new(pool: impl Into<String>, image: impl Into<String>) -> Self {
        let (pool, image) = (pool.into(), image.into());
        RbdOptions {
            name: format!("rbd:{pool}/{image}"),
            pool,
            namespace: None,
            image,
            snapshot: None,
            conf: None,
            user: None,
            monitors: Vec::new(),
            key: None,
            authentication: Vec::new(),
            more: Vec::new(),
            cached: true,
            writable: false,
            encryption: None,
        }
    }

    /// All of them that are Ceph's own options, by their names there; later ones win.
    pub(super) fn settings(&self) -> Vec<(String, Zeroizing<String>)> {
        let cached = if self.cached { "true" } else { "false" };
        let mut all = vec![("rbd_cache".to_owned(), Zeroizing::new(cached.to_owned()))];
        let more = self.more.iter();
        all.extend(more.map(|(key, value)| (key.clone(), Zeroizing::new(value.clone()))));
        if !self.monitors.is_empty() {
            let monitors = self.monitors.join(";");
            all.push(("mon_host".to_owned(), Zeroizing::new(monitors)));
        }
        if !self.authentication.is_empty() {
            let ways = self.authentication.join(";");
            all.push(("auth_client_required".to_owned(), Zeroizing::new(ways)));
        }
        if let Some(key) = &self.key {
            all.push(("key".to_owned(), key.clone()));
        }
        all
    }
}

impl std::fmt::Debug for RbdOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RbdOptions({})", self.name)
    }
}

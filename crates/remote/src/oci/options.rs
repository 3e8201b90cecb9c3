//! How a registry is spoken to.

use std::time::Duration;

use crate::connection::{ConnectionOptions, Login};

/// A registry looks at all of a layer before it answers.
const TIMEOUT: Duration = Duration::from_secs(120);

/// How a registry is spoken to.
#[derive(Debug, Clone)]
pub struct OciOptions {
    /// Without TLS, which is for registries on this machine.
    pub plain_http: bool,
    /// Who asks, if the registry wants to know.
    pub login: Option<Login>,
    /// The machine that the image is for, in the words of registries: `amd64`, `arm64`.
    pub architecture: String,
    /// How the server is spoken to.
    pub connection: ConnectionOptions,
}

impl Default for OciOptions {
    fn default() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        OciOptions {
            plain_http: false,
            login: None,
            architecture: architecture.to_owned(),
            connection: ConnectionOptions {
                timeout: TIMEOUT,
                ..ConnectionOptions::default()
            },
        }
    }
}

/// A SHA-256 as registries write it.
pub(crate) fn digest_text(digest: impl AsRef<[u8]>) -> String {
    let digits = digest.as_ref().iter();
    let digits: String = digits.map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}

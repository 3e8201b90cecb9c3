//! Registries of containers: what `vellum_remote` does with them, with the secrets of command lines.

use std::path::PathBuf;

use vellum::Result;
pub use vellum_remote::oci::{OciOptions, Packing, Pull, Pulled, Push, Reference, pull, push};
use vellum_remote::{ConnectionOptions, Login};
use zeroize::Zeroizing;

use vellum_graph::secret;

/// What a user says of a registry.
#[derive(Debug, Clone, Default)]
pub struct RegistryOptions {
    /// Who asks.
    pub username: Option<String>,
    /// The secret object with the password.
    pub password_secret: Option<String>,
    /// Without TLS.
    pub plain_http: bool,
    /// Certificates (PEM) that are trusted beside the system's.
    pub authorities: Option<PathBuf>,
    /// The machine that the image is for; this one's if `None`.
    pub architecture: Option<String>,
}

impl RegistryOptions {
    /// The same with the password itself.
    ///
    /// # Errors
    /// If there is no such secret.
    pub fn resolve(&self) -> Result<OciOptions> {
        let mut options = OciOptions {
            plain_http: self.plain_http,
            ..OciOptions::default()
        };
        options.connection = ConnectionOptions {
            authorities: self.authorities.clone(),
            ..options.connection
        };
        if let Some(architecture) = &self.architecture {
            options.architecture.clone_from(architecture);
        }
        let password = match &self.password_secret {
            Some(id) => {
                let bytes = secret::passphrase(id)?;
                let text = String::from_utf8_lossy(bytes.bytes()).into_owned();
                Some(Zeroizing::new(text))
            }
            None => None,
        };
        options.login = self
            .username
            .clone()
            .map(|username| Login { username, password });
        Ok(options)
    }
}

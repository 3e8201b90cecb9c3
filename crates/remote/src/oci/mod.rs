//! Disks in registries of containers: images of one layer, an archive with the disk as
//! `disk/disk.qcow2`, as KubeVirt has them (`containerDisk`).
//!
//! [`pull()`] streams a layer: bytes are hashed as they arrive, and unpacked beside that (`layer`,
//! `tar`); [`push()`] makes one. `registry` speaks with the server, `manifest` and `reference`
//! are what is said.
//!
//! Invariants:
//! - What was pulled is complete, and has the SHA-256 that the manifest says, or it is an error.
//! - It is the file that a container of the image would see (`union`), or it is an error.
//! - Nothing that a registry or an archive says becomes the name of a file.
//! - Memory is bounded: some chunks of a layer, and 4 MiB of a manifest.

mod layer;
mod manifest;
mod pull;
mod push;
mod reference;
mod registry;
mod tar;
mod union;

use std::time::Duration;

use crate::connection::{ConnectionOptions, Login};

pub use layer::Packing;
pub use pull::{Pull, Pulled, pull};
pub use push::{Push, push};
pub use reference::Reference;

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
fn digest_text(digest: impl AsRef<[u8]>) -> String {
    let digits = digest.as_ref().iter();
    let digits: String = digits.map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}

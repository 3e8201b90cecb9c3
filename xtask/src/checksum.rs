//! Checksums of files, by which `golden` and `iotests` compare what they made or fetched.

use std::path::Path;

use anyhow::Result;
use sha2::{Digest, Sha256};

/// The SHA-256 of a file, in hexadecimal digits.
pub fn sha256(path: &Path) -> Result<String> {
    let digest = Sha256::digest(std::fs::read(path)?);
    Ok(digest.iter().map(|byte| format!("{byte:02x}")).collect())
}

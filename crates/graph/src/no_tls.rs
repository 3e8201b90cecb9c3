//! TLS in a build without it: every use is refused.

use std::sync::Arc;

use vellum::{Error, ErrorKind, Result};
use vellum_nbd::Upgrade;
use vellum_options::Options;

fn refused<T>() -> Result<T> {
    let message = "TLS credentials support requires a build with the feature 'tls'";
    Err(Error::new(ErrorKind::Unsupported, "make object", message))
}

/// Whether objects of this type would be made here.
pub fn is_type(name: &str) -> bool {
    name.starts_with("tls-creds-") || name.starts_with("authz-")
}

/// Refuses.
///
/// # Errors
/// Always: the build has no TLS.
pub fn add(_kind: &str, _options: Options) -> Result<()> {
    refused()
}

/// Refuses.
///
/// # Errors
/// Always: the build has no TLS.
pub fn client(_id: &str, _hostname: Option<String>) -> Result<Arc<dyn Upgrade>> {
    refused()
}

/// Refuses.
///
/// # Errors
/// Always: the build has no TLS.
pub fn for_uri(_options: Options, _host: Option<String>) -> Result<Arc<dyn Upgrade>> {
    refused()
}

/// Refuses.
///
/// # Errors
/// Always: the build has no TLS.
pub fn server(_id: &str, _authorizer: Option<String>) -> Result<Arc<dyn Upgrade>> {
    refused()
}

/// None: there are no such objects.
pub fn kind(_id: &str) -> Option<&'static str> {
    None
}

/// None.
pub fn names() -> Vec<String> {
    Vec::new()
}

/// There was none.
pub fn remove(_id: &str) -> bool {
    false
}

//! [`Authorizer`]: who may come in.

/// Decides who may come in, by the name in the certificate. Whoever runs a server implements it.
pub trait Authorizer: Send + Sync + std::fmt::Debug {
    /// Whether that name may.
    ///
    /// # Errors
    /// If nobody can tell; then the peer stays out.
    fn is_allowed(&self, identity: &str) -> vellum_io::Result<bool>;
}

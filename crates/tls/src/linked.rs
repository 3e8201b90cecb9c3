//! What `library` is where the linker has seen to OpenSSL.

/// Loads nothing.
///
/// # Errors
///
/// None here.
pub(crate) fn load() -> Result<(), String> {
    Ok(())
}

//! Names that lead out of a package are none.

/// A name without the `./` that some programs put before it.
pub fn plain_name(mut name: &str) -> &str {
    while let Some(rest) = name.strip_prefix("./") {
        name = rest;
    }
    name
}

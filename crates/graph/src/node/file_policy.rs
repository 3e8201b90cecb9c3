//! Which files an image may name.

use std::path::PathBuf;

use vellum::{Error, ErrorKind, Result, Storage};
use vellum_foreign::ova::MemberStorage;
use vellum_options::{filename, ova_name};

/// Which files an image may name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum FilePolicy {
    /// Any, as QEMU's tools allow.
    #[default]
    Any,
    /// Only files below this directory, named by path.
    Within(PathBuf),
    /// None.
    Nothing,
    /// None: the image lies in a package of a virtual machine.
    Package,
}

impl FilePolicy {
    /// Returns the policy for the names in an image that lies in `file`: a user who names a package does not vouch for
    /// the names in it.
    pub(crate) fn of_image(&self, file: &dyn Storage) -> FilePolicy {
        match MemberStorage::of(file) {
            Some(_) => FilePolicy::Package,
            None => self.clone(),
        }
    }

    pub(crate) fn admit(&self, image: &str, name: &str) -> Result<()> {
        ova_name::refuse_named(image, name)?;
        let allowed = match self {
            FilePolicy::Any => true,
            FilePolicy::Nothing => false,
            FilePolicy::Package => return Err(ova_name::named_in_package(image, name)),
            FilePolicy::Within(directory) => lies_within(name, directory),
        };
        if allowed {
            return Ok(());
        }
        let message = format!("the policy does not allow the file '{name}' that the image names");
        Err(Error::new(ErrorKind::Denied, "open", message).target(image))
    }
}

/// Whether a name is a plain path to something below `directory`, with all
/// links followed.
fn lies_within(name: &str, directory: &std::path::Path) -> bool {
    let Ok(path) = filename::local_path(name) else {
        return false;
    };
    match (
        std::fs::canonicalize(path),
        std::fs::canonicalize(directory),
    ) {
        (Ok(path), Ok(directory)) => path.starts_with(directory),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_confines() {
        let directory = tempfile::tempdir().unwrap();
        let inside = directory.path().join("a");
        std::fs::write(&inside, b"").unwrap();
        let policy = FilePolicy::Within(directory.path().to_owned());
        assert!(policy.admit("i", inside.to_str().unwrap()).is_ok());
        assert!(policy.admit("i", "/etc/passwd").is_err());
        assert!(policy.admit("i", "nbd:localhost:1").is_err());
        assert!(policy.admit("i", "http://localhost/a").is_err());
        let escape = format!("{}/../../etc/passwd", directory.path().display());
        assert!(policy.admit("i", &escape).is_err());
        assert!(FilePolicy::Nothing.admit("i", "a").is_err());
    }
}

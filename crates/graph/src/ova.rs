//! Packages of virtual machines (OVA): opening one to list it, and comparing a member with the package's manifest. Their
//! names are [`vellum_options::ova_name`]'s.

use vellum::{Result, Storage};
pub use vellum_foreign::ova::{
    Algorithm, Descriptor, FileReference, Manifest, Member, MemberStorage, Package, Sum,
    VirtualDisk,
};
use vellum_options::{OpenFlags, Options};

use crate::node::file_node::FileUse;
use crate::node::file_policy::FilePolicy;
use crate::node::origin::Role;
use crate::open::context::OpenContext;
use crate::open::node::open_node;

/// Opens a package, to see what is in it.
///
/// # Errors
/// What opening the file says; for what is no package.
pub async fn open_package(path: &str, force_share: bool) -> Result<Package> {
    let flags = OpenFlags {
        force_share,
        ..OpenFlags::default()
    };
    let around = OpenContext::alone(flags, FilePolicy::Any);
    let mut options = Options::new();
    options.set_text("filename", path);
    let file = open_node(options, Role::Protocol, &around).await?;
    let file = file.into_storage(&around.flags, FileUse::Raw).await?;
    Package::open(file).await
}

/// Compares a storage with the manifest of the package that it is a member of, if it is one. Others are
/// never wrong.
///
/// # Errors
/// [`vellum::ErrorKind::InvalidImage`] if the manifest says something else; what the storage says.
pub async fn verify(storage: &dyn Storage) -> Result<()> {
    match MemberStorage::of(storage) {
        Some(member) => member.verify().await,
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use vellum::ErrorKind;
    use vellum_foreign::ova::tar;

    use super::*;

    #[test]
    fn images_in_packages_open_nothing_beside_them() {
        let folder = tempfile::tempdir().unwrap();
        let package = folder.path().join("m.ova").display().to_string();
        let mut block = [0; tar::BLOCK_BYTES];
        block[257..262].copy_from_slice(b"ustar");
        std::fs::write(&package, block).unwrap();
        for name in ["flat.vmdk", "/etc/passwd", "nbd://host/disk"] {
            let error = FilePolicy::Any.admit(&format!("{package}#d"), name);
            assert_eq!(error.unwrap_err().kind(), ErrorKind::Denied, "{name}");
        }
    }
}

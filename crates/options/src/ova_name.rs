//! Packages of virtual machines (OVA) by name: `machine.ova#disk1.vmdk` is a disk in one.
//!
//! Called for every name without options, so that it looks at the host only where a name may be one.
//!
//! Invariant: a name that is a file's is that file, whatever else it could mean.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use vellum::{Error, ErrorKind, Result};
use vellum_foreign::ova::tar;

use crate::filename;
use crate::options::Options;

/// The driver of members.
pub const DRIVER: &str = "ova";
/// Between the name of a package and that of a member.
const MARK: char = '#';

/// The name of a package and that of a member in it, if a path is made of both. No name of a member:
/// the only disk.
pub fn split(path: &str) -> Option<(&str, &str)> {
    let (package, member) = path.rsplit_once(MARK)?;
    let is_file = std::fs::symlink_metadata(path).is_ok();
    (!is_file && is_package(package)).then_some((package, member))
}

/// Whether a path leads to a file that begins as packages do.
pub fn is_package(path: &str) -> bool {
    // A pipe would make the program wait.
    if !std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file()) {
        return false;
    }
    let mut block = [0; tar::BLOCK_BYTES];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut block));
    read.is_ok() && tar::may_be_package(&block)
}

/// The path of the package that a name without options means, if it is called like one and is one.
pub fn named_package(name: &str) -> Option<String> {
    let is_called_so = |path: &String| {
        let end = Path::new(path).extension();
        end.is_some_and(|end| end.eq_ignore_ascii_case(DRIVER))
    };
    let path = filename::local_path(name).ok().filter(is_called_so)?;
    is_package(&path).then_some(path)
}

/// The name of the only disk of a package.
pub fn name_of_only_disk(package: &str) -> String {
    format!("{package}{MARK}")
}

/// The options of the node that a path means, if it is a member's.
pub fn node_options(path: &str) -> Option<Options> {
    let (package, member) = split(path)?;
    let mut options = Options::new();
    options.set_text("driver", DRIVER);
    options.set_text("file.filename", package);
    if !member.is_empty() {
        options.set_text("member", member);
    }
    Some(options)
}

/// The name that opens a member of a package again.
pub fn name_of(package: &str, options: &Options) -> Option<String> {
    let member = options.get_text("member")?;
    Some(format!("{package}{MARK}{member}")).filter(|name| split(name).is_some())
}

/// Refuses any name that stands in an image which lies in a package, by the image's name: a name beside it would lead
/// out of the package, and an absolute one, a URL or `json:{...}` to whatever the package's author likes.
///
/// # Errors
/// [`ErrorKind::Denied`] if the image lies in a package.
pub fn refuse_named(image: &str, name: &str) -> Result<()> {
    if !image.contains(MARK) || filename::local_path(image).is_ok_and(|path| split(&path).is_none())
    {
        return Ok(());
    }
    Err(named_in_package(image, name))
}

/// That an image in a package names another file.
pub fn named_in_package(image: &str, name: &str) -> Error {
    let message = format!(
        "an image in a package opens no other file, and this one names '{name}': unpack the package, and look at the \
         name before opening it ('vellum audit')"
    );
    Error::new(ErrorKind::Denied, "open", message).target(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header of a tar file.
    fn header(name: &str) -> Vec<u8> {
        let mut block = vec![0; tar::BLOCK_BYTES];
        block[..name.len()].copy_from_slice(name.as_bytes());
        block[124..136].copy_from_slice(b"00000000000\0");
        block[148..156].fill(b' ');
        block[156] = b'0';
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block
    }

    #[test]
    fn members_are_known_by_the_package() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(path("m.ova"), header("m.ovf")).unwrap();
        std::fs::write(path("m#1.ova"), header("m.ovf")).unwrap();
        std::fs::write(path("other.ova"), [1; 512]).unwrap();
        std::fs::write(path("m.ova#file"), b"").unwrap();
        let member = |name: &str| split(&path(name)).map(|(_, member)| member.to_owned());
        assert_eq!(member("m.ova#d"), Some("d".to_owned()));
        assert_eq!(member("m#1.ova#d"), Some("d".to_owned()));
        assert_eq!(member("m.ova#"), Some(String::new()));
        for name in [
            "m.ova",
            "m.ova#file",
            "m#1.ova",
            "other.ova#d",
            "none.ova#d",
        ] {
            assert_eq!(member(name), None, "{name}");
        }
        assert!(named_package(&path("m.ova")).is_some());
        assert!(named_package(&path("other.ova")).is_none());
        assert!(named_package("nbd:m.ova").is_none());
        let options = filename::node_options(&path("m.ova#d")).unwrap();
        assert_eq!(options.get_text("driver"), Some(DRIVER));
        let plain = filename::node_options(&path("m.ova#file")).unwrap();
        assert_eq!(plain.get_text("driver"), None);
    }

    #[test]
    fn images_in_packages_name_nothing_beside_them() {
        let folder = tempfile::tempdir().unwrap();
        let package = folder.path().join("m.ova").display().to_string();
        std::fs::write(&package, header("m.ovf")).unwrap();
        let image = format!("{package}#d");
        for name in [
            "flat.vmdk",
            "/etc/passwd",
            "file:/etc/passwd",
            "nbd://host/disk",
            "json:{\"driver\": \"file\", \"filename\": \"/etc/passwd\"}",
        ] {
            let error = filename::resolve(&image, name).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Denied, "{name}");
        }
        assert!(filename::resolve(&package, "flat.vmdk").is_ok());
        assert!(filename::resolve("x#y", "flat.vmdk").is_ok());
    }
}

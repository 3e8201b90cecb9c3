//! File names as QEMU reads them: protocol prefixes, and names relative to an image.

use vellum::{Error, ErrorKind, Result};

/// The protocol prefix of a name (`nbd` of `nbd:localhost`), if it has one.
pub fn protocol(name: &str) -> Option<&str> {
    let end = name.find([':', '/'])?;
    name[end..].starts_with(':').then(|| &name[..end])
}

/// The path that a name without options means, or why it means none.
pub fn local_path(name: &str) -> Result<String> {
    match protocol(name) {
        None => Ok(name.to_owned()),
        Some("file") => {
            let path = &name["file:".len()..];
            // What looks like a protocol once more must not be taken for one.
            Ok(if protocol(path).is_some() {
                format!("./{path}")
            } else {
                path.to_owned()
            })
        }
        Some(known) if is_known_protocol(known) => Err(Error::new(
            ErrorKind::Unsupported,
            "open",
            format!("The protocol '{known}' is not part of this version of vellum"),
        )),
        Some(other) => Err(Error::new(
            ErrorKind::InvalidArgument,
            "open",
            format!("Unknown protocol '{other}'"),
        )),
    }
}

/// Protocols that QEMU knows and we do not have yet.
fn is_known_protocol(name: &str) -> bool {
    const KNOWN: &[&str] = &[
        "nbd",
        "nbd+tcp",
        "nbd+unix",
        "nbd+vsock",
        "http",
        "https",
        "ftp",
        "ftps",
        "ssh",
        "iscsi",
        "iser",
        "nfs",
        "rbd",
        "gluster",
        "gluster+tcp",
        "gluster+unix",
        "gluster+rdma",
        "fat",
        "blkdebug",
        "blkverify",
        "null-co",
        "null-aio",
        "nvme",
        "host_device",
        "host_cdrom",
    ];
    KNOWN.contains(&name)
}

/// The full name of a file that `image` names as `name`.
pub fn resolve(image: &str, name: &str) -> Result<String> {
    if protocol(name).is_some() || name.starts_with('/') {
        return Ok(name.to_owned());
    }
    if image.is_empty() || image.starts_with("json:") {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            "open",
            format!("Cannot use relative backing file names for '{image}'"),
        ));
    }
    Ok(join(image, name))
}

/// `name` in the directory of `image`.
fn join(image: &str, name: &str) -> String {
    let after_protocol = protocol(image).map_or(0, |protocol| protocol.len() + 1);
    let directory = match image[after_protocol..].rfind('/') {
        Some(slash) => after_protocol + slash + 1,
        None => after_protocol,
    };
    format!("{}{name}", &image[..directory])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sees_protocols() {
        assert_eq!(protocol("nbd:localhost:1"), Some("nbd"));
        assert_eq!(protocol("./nbd:x"), None);
        assert_eq!(protocol("plain"), None);
        assert_eq!(local_path("file:a").unwrap(), "a");
        assert_eq!(local_path("file:a:b").unwrap(), "./a:b");
        assert_eq!(
            local_path("foo:a").unwrap_err().message(),
            "Unknown protocol 'foo'"
        );
    }

    #[test]
    fn resolves_names_against_the_image() {
        let cases = [
            ("d/o.qcow2", "../a", "d/../a"),
            ("o.qcow2", "a", "a"),
            ("file:d/o", "a", "file:d/a"),
            ("file:o", "a", "file:a"),
            ("/x/o", "a", "/x/a"),
            ("/x/o", "/b", "/b"),
            ("/x/o", "nbd:h", "nbd:h"),
        ];
        for (image, name, full) in cases {
            assert_eq!(resolve(image, name).unwrap(), full);
        }
        assert!(resolve("json:{}", "a").is_err());
    }
}

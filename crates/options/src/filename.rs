//! File names as QEMU reads them: protocol prefixes, and names relative to an image.

use std::borrow::Cow;

use vellum::{Error, ErrorKind, Result};

use crate::nbd_name;
use crate::options::Options;
use crate::ova_name;
use crate::rbd_name;
use crate::repository_name;
use crate::ssh_name;
use crate::url_name;

/// Protocols whose names are taken apart here.
const OURS: &[&str] = &[
    "blkdebug",
    "blkverify",
    "null-co",
    "null-aio",
    "host_device",
    repository_name::DRIVER,
];

/// The protocol prefix of a name (`nbd` of `nbd:localhost`), if it has one.
pub fn protocol(name: &str) -> Option<&str> {
    let end = name.find([':', '/'])?;
    name[end..].starts_with(':').then(|| &name[..end])
}

/// Whether a name means a file on another machine: on a web server, in a store, in a cluster.
pub fn is_on_server(name: &str) -> bool {
    protocol(name).is_some_and(|protocol| {
        url_name::SCHEMES.contains(&protocol)
            || matches!(protocol, rbd_name::SCHEME | ssh_name::SCHEME)
    })
}

/// The path that a name without options means.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for a protocol that is not part of Vellum,
/// [`ErrorKind::InvalidArgument`] for one that nobody knows.
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

/// The options of the protocol node that a name means.
///
/// # Errors
/// As [`local_path`]; and where the name is not as its protocol wants it.
pub fn node_options(name: &str) -> Result<Options> {
    let mut options = Options::new();
    if protocol(name).is_some_and(nbd_name::is_scheme) {
        return nbd_name::options(name);
    }
    if let Some(scheme) = protocol(name).filter(|protocol| url_name::is_scheme(protocol)) {
        return Ok(url_name::options(name, scheme));
    }
    match protocol(name) {
        Some(rbd_name::SCHEME) => return rbd_name::options(name),
        Some(ssh_name::SCHEME) => return ssh_name::options(name),
        _ => {}
    }
    let Some(known) = protocol(name).filter(|protocol| OURS.contains(protocol)) else {
        let path = local_path(name)?;
        if let Some(member) = ova_name::node_options(&path) {
            return Ok(member);
        }
        options.set_text("filename", path);
        return Ok(options);
    };
    options.set_text("driver", known);
    let rest = &name[known.len() + 1..];
    let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, "open", message);
    match known {
        "null-co" | "null-aio" if rest == "//" => {}
        "null-co" | "null-aio" => {
            return Err(invalid(format!(
                "The only allowed filename for this driver is '{known}://'"
            )));
        }
        repository_name::DRIVER => {
            let mut options = repository_name::options(rest)?;
            options.set_text("driver", known);
            return Ok(options);
        }
        "host_device" => options.set_text("filename", rest),
        "blkdebug" => {
            let Some((config, image)) = rest.split_once(':') else {
                return Err(invalid(
                    "blkdebug requires both config file and image path".to_owned(),
                ));
            };
            if !config.is_empty() {
                options.set_text("config", config);
            }
            options.set_group("image", node_options(image)?);
        }
        _ => {
            let Some((raw, test)) = rest.split_once(':') else {
                return Err(invalid(
                    "blkverify requires raw copy and original image path".to_owned(),
                ));
            };
            options.set_group("raw", node_options(raw)?);
            options.set_group("test.file", node_options(test)?);
        }
    }
    Ok(options)
}

/// The protocols that names may begin with.
pub fn schemes() -> impl Iterator<Item = &'static str> {
    let others = OURS
        .iter()
        .chain(nbd_name::SCHEMES)
        .chain(url_name::SCHEMES)
        .chain(&[rbd_name::SCHEME, ssh_name::SCHEME]);
    std::iter::once("file").chain(others.copied())
}

/// Protocols that QEMU knows and that name no file here.
fn is_known_protocol(name: &str) -> bool {
    const KNOWN: &[&str] = &[
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
        "nvme",
        "host_cdrom",
    ];
    KNOWN.contains(&name) || nbd_name::is_scheme(name) || url_name::is_scheme(name)
}

/// The full name of a file that `image` names as `name`.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a relative name in an image that has no directory,
/// [`ErrorKind::Denied`] for any name in one that lies in a package.
pub fn resolve(image: &str, name: &str) -> Result<String> {
    ova_name::refuse_named(image, name)?;
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

/// A text in which no URL has a password any more, `://NAME:***@`, and no URL of a web server the values of its query,
/// `?NAME=***`: a signed URL lets its holder read the file.
pub fn without_passwords(text: &str) -> Cow<'_, str> {
    let mut shown = Cow::Borrowed(text);
    let mut from = 0;
    while let Some(at) = shown[from..].find("://") {
        let start = from + at + 3;
        let is_web = ["http", "https"]
            .iter()
            .any(|scheme| shown[..from + at].ends_with(scheme));
        if is_web {
            redact_query(&mut shown, start);
        }
        let ends = |c: char| "/?# \"'<>".contains(c) || c.is_whitespace();
        let end = shown[start..]
            .find(ends)
            .map_or(shown.len(), |len| start + len);
        let user = shown[start..end]
            .rfind('@')
            .map(|len| &shown[start..start + len]);
        let password = user.and_then(|user| Some(start + user.find(':')? + 1..start + user.len()));
        from = start;
        if let Some(password) = password {
            shown.to_mut().replace_range(password, "***");
        }
    }
    shown
}

/// Takes the values out of the query of the URL that goes on at `start`.
fn redact_query(shown: &mut Cow<'_, str>, start: usize) {
    let url_ends = |c: char| "\"'<>\\".contains(c) || c.is_whitespace();
    let end = shown[start..]
        .find(url_ends)
        .map_or(shown.len(), |len| start + len);
    let Some(query) = shown[start..end].find('?').map(|at| start + at + 1) else {
        return;
    };
    let end = shown[query..end].find('#').map_or(end, |len| query + len);
    let redacted = shown[query..end]
        .split('&')
        .map(|part| match part.split_once('=') {
            Some((name, _)) => format!("{name}=***"),
            None if part.is_empty() => String::new(),
            None => "***".to_owned(),
        });
    let redacted = redacted.collect::<Vec<_>>().join("&");
    if redacted != shown[query..end] {
        shown.to_mut().replace_range(query..end, &redacted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_on_servers_are_told_by_their_protocols() {
        for name in ["s3://b/k", "https://h/f", "ssh://h/f", "rbd:pool/image"] {
            assert!(is_on_server(name), "{name}");
        }
        for name in [
            "disk",
            "./s3:x",
            "nbd:unix:x",
            "file:disk",
            "repo+file:///x",
        ] {
            assert!(!is_on_server(name), "{name}");
        }
    }

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
    fn protocols_become_options() {
        let options = |name: &str| {
            let options = node_options(name).map_err(|error| error.message().to_owned())?;
            let text = options
                .iter()
                .map(|(key, value)| format!("{key}={value:?}"));
            Ok::<_, String>(text.collect::<Vec<_>>().join(" "))
        };
        assert_eq!(options("file:a:b").unwrap(), r#"filename=Text("./a:b")"#);
        assert_eq!(
            options("blkdebug:conf:null-co://").unwrap(),
            r#"config=Text("conf") driver=Text("blkdebug") image.driver=Text("null-co")"#
        );
        assert_eq!(
            options("blkverify:a:b").unwrap(),
            r#"driver=Text("blkverify") raw.filename=Text("a") test.file.filename=Text("b")"#
        );
        for (name, message) in [
            (
                "null-co:",
                "The only allowed filename for this driver is 'null-co://'",
            ),
            (
                "blkdebug:a",
                "blkdebug requires both config file and image path",
            ),
            (
                "blkverify:a",
                "blkverify requires raw copy and original image path",
            ),
            ("foo:a", "Unknown protocol 'foo'"),
        ] {
            assert_eq!(options(name).unwrap_err(), message);
        }
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

    #[test]
    fn passwords_are_taken_out_of_texts() {
        for (text, shown) in [
            ("a://b/c", "a://b/c"),
            ("a://me@b/c:d@e", "a://me@b/c:d@e"),
            ("a://me:secret@b/c", "a://me:***@b/c"),
            ("a://:s@b", "a://:***@b"),
            ("a://me:p@ss:w@b:80/c", "a://me:***@b:80/c"),
            (
                "x '{\"url\": \"a://m:s@b/\"}' a://n:t@c",
                "x '{\"url\": \"a://m:***@b/\"}' a://n:***@c",
            ),
            ("a://b:80/c, d:e@f", "a://b:80/c, d:e@f"),
            (
                "Could not open 'https://me:s@h/x?X-Amz-Date=1&X-Amz-Signature=ab%2Fc#f': no",
                "Could not open 'https://me:***@h/x?X-Amz-Date=***&X-Amz-Signature=***#f': no",
            ),
            (
                "{\"url\": \"http://h/x?sv=1&sig=a/b:c@d\"} https://h/y?opaque z",
                "{\"url\": \"http://h/x?sv=***&sig=***\"} https://h/y?*** z",
            ),
            ("http://h/x? http://h/y", "http://h/x? http://h/y"),
            ("nbd+unix:///?socket=/s", "nbd+unix:///?socket=/s"),
            ("nothing", "nothing"),
        ] {
            assert_eq!(without_passwords(text), shown);
        }
    }
}

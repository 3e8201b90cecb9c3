//! Names of NBD exports: `nbd://`, `nbd+unix://` and the older `nbd:`, to options and
//! back. `nbds://` and `nbds+unix://` mean TLS, with libnbd's parameters, which QEMU does
//! not have.

use vellum::{Error, ErrorKind, Result};
use vellum_nbd::proto::DEFAULT_PORT;

use crate::options::{Options, Scalar};

/// Options that the name of a secured export stands for: the name itself, and its
/// parameters.
pub const TLS_GROUP: &str = "x-uri";
/// The parameters of such a name.
const TLS_PARAMETERS: &[&str] = &[
    "tls-certificates",
    "tls-hostname",
    "tls-psk-file",
    "tls-username",
    "tls-verify-peer",
];
/// What stands before the export in a name of the older kind.
const EXPORT_MARK: &str = ":exportname=";

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

/// The protocols of names that belong here.
pub const SCHEMES: &[&str] = &[
    "nbd",
    "nbd+tcp",
    "nbd+unix",
    "nbds",
    "nbds+tcp",
    "nbds+unix",
];

/// Whether names of this protocol belong here.
pub fn is_scheme(protocol: &str) -> bool {
    SCHEMES.contains(&protocol)
}

/// The options of the node that a name means.
///
/// # Errors
/// In QEMU's words for a name that means none.
pub fn options(name: &str) -> Result<Options> {
    let mut options = Options::new();
    options.set_text("driver", "nbd");
    match name.contains("://") {
        true => take_uri(name, &mut options).ok_or_else(|| invalid("No valid URL specified"))?,
        false => take_legacy(name, &mut options)?,
    }
    Ok(options)
}

fn take_uri(name: &str, options: &mut Options) -> Option<()> {
    let (scheme, rest) = name.split_once("://")?;
    if !is_scheme(scheme) {
        return None;
    }
    let rest = rest.split('#').next()?;
    let (place, query) = match rest.split_once('?') {
        Some((place, query)) => (place, Some(query)),
        None => (rest, None),
    };
    let (authority, path) = match place.find('/') {
        Some(slash) => place.split_at(slash),
        None => (place, ""),
    };
    let export = decode(path.strip_prefix('/').unwrap_or(path))?;
    if !export.is_empty() {
        options.set_text("export", export);
    }
    let mut parameters: Vec<&str> = query
        .unwrap_or_default()
        .split('&')
        .filter(|parameter| !parameter.is_empty())
        .collect();
    if scheme.starts_with("nbds") {
        options.set_text(&format!("{TLS_GROUP}.name"), name);
        let mut rest = Vec::new();
        for parameter in parameters {
            match parameter.split_once('=') {
                Some((key, value)) if TLS_PARAMETERS.contains(&key) => {
                    options.set_text(&format!("{TLS_GROUP}.{key}"), decode(value)?);
                }
                _ => rest.push(parameter),
            }
        }
        parameters = rest;
    }
    if scheme.ends_with("+unix") {
        let [parameter] = parameters[..] else {
            return None;
        };
        let socket = decode(parameter.strip_prefix("socket=")?)?;
        if !authority.is_empty() {
            return None;
        }
        options.set_text("server.type", "unix");
        options.set_text("server.path", socket);
        return Some(());
    }
    if !parameters.is_empty() {
        return None;
    }
    let (host, port) = split_authority(authority)?;
    options.set_text("server.type", "inet");
    options.set_text("server.host", decode(host)?);
    options.set_text("server.port", port.to_string());
    Some(())
}

/// Host and port of an authority; the host is not empty.
fn split_authority(authority: &str) -> Option<(&str, u16)> {
    let authority = authority.rsplit('@').next()?;
    let (host, rest) = match authority.strip_prefix('[') {
        Some(inner) => inner.split_once(']')?,
        None => match authority.find(':') {
            Some(colon) => authority.split_at(colon),
            None => (authority, ""),
        },
    };
    let port = match rest.strip_prefix(':') {
        Some("") | None if rest.len() < 2 => DEFAULT_PORT,
        Some(digits) => digits.parse().ok()?,
        None => return None,
    };
    let port = if port == 0 { DEFAULT_PORT } else { port };
    (!host.is_empty()).then_some((host, port))
}

/// A part of a URI without its percent signs; `None` if that is no text.
pub fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16);
        let value = digit()? * 16 + digit()?;
        if value == 0 {
            return None;
        }
        bytes.push(u8::try_from(value).ok()?);
    }
    String::from_utf8(bytes).ok()
}

fn take_legacy(name: &str, options: &mut Options) -> Result<()> {
    let mut place = name;
    if let Some(at) = name.find(EXPORT_MARK) {
        let export = &name[at + EXPORT_MARK.len()..];
        if export.is_empty() {
            return Ok(());
        }
        options.set_text("export", export);
        place = &name[..at];
    }
    let Some(place) = place.strip_prefix("nbd:") else {
        return Err(invalid("File name string for NBD must start with 'nbd:'"));
    };
    if place.is_empty() {
        return Ok(());
    }
    if let Some(path) = place.strip_prefix("unix:") {
        options.set_text("server.type", "unix");
        options.set_text("server.path", path);
        return Ok(());
    }
    let parsed = match place.strip_prefix('[') {
        Some(inner) => inner.split_once("]:"),
        None => place.split_once(':'),
    };
    let Some((host, port)) = parsed.filter(|(_, port)| !port.is_empty()) else {
        return Err(invalid(format!("error parsing address '{place}'")));
    };
    options.set_text("server.type", "inet");
    options.set_text("server.host", host);
    options.set_text("server.port", port);
    Ok(())
}

/// The name that opens the same export again; `None` if options say what no name can.
pub fn name_of(options: &Options) -> Option<String> {
    let text = |key: &str| match options.iter().find(|(name, _)| *name == key) {
        Some((_, Scalar::Text(text))) => Some(text.clone()),
        Some((_, Scalar::Number(number))) => Some(number.to_string()),
        _ => None,
    };
    if let Some(filename) = text("filename") {
        return name_of(&self::options(&filename).ok()?);
    }
    if let Some(name) = text(&format!("{TLS_GROUP}.name")) {
        return Some(name);
    }
    let export = text("export").unwrap_or_default();
    if let Some(path) = text("server.path").or_else(|| text("path")) {
        return Some(match export.as_str() {
            "" => format!("nbd+unix://?socket={path}"),
            export => format!("nbd+unix:///{export}?socket={path}"),
        });
    }
    let host = text("server.host").or_else(|| text("host"))?;
    let port = text("server.port").or_else(|| text("port"));
    let port = port.unwrap_or_else(|| DEFAULT_PORT.to_string());
    Some(match export.as_str() {
        "" => format!("nbd://{host}:{port}"),
        export => format!("nbd://{host}:{port}/{export}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(name: &str) -> String {
        match options(name) {
            Err(error) => error.message().to_owned(),
            Ok(options) => {
                let words = options.iter().filter(|(key, _)| *key != "driver");
                let words = words.map(|(key, value)| match value {
                    Scalar::Text(text) => format!("{key}={text}"),
                    other => format!("{key}={other:?}"),
                });
                words.collect::<Vec<_>>().join(" ")
            }
        }
    }

    #[test]
    fn names_are_taken_apart() {
        for (name, options) in [
            (
                "nbd://h/e",
                "export=e server.host=h server.port=10809 server.type=inet",
            ),
            (
                "nbd+tcp://[::1]:99",
                "server.host=::1 server.port=99 server.type=inet",
            ),
            (
                "nbd+unix:///a%20b/c?socket=/s%2fx",
                "export=a b/c server.path=/s/x server.type=unix",
            ),
            ("nbd+unix://?socket=s", "server.path=s server.type=unix"),
            (
                "nbd:unix:/s:exportname=x",
                "export=x server.path=/s server.type=unix",
            ),
            (
                "nbd:h:1:exportname=x:y",
                "export=x:y server.host=h server.port=1 server.type=inet",
            ),
            (
                "nbds://h/e?tls-psk-file=/k&tls-username=u",
                "export=e server.host=h server.port=10809 server.type=inet \
                 x-uri.name=nbds://h/e?tls-psk-file=/k&tls-username=u x-uri.tls-psk-file=/k \
                 x-uri.tls-username=u",
            ),
            ("nbd://h/e?tls-psk-file=/k", "No valid URL specified"),
            ("nbd:", ""),
            ("nbd:h", "error parsing address 'h'"),
            ("nbd+unix:///x", "No valid URL specified"),
            ("nbd+unix://h/x?socket=s", "No valid URL specified"),
            ("nbd:///x", "No valid URL specified"),
            ("nbd://h:x/", "No valid URL specified"),
            ("nbd://h/x?y=z", "No valid URL specified"),
            ("nbd://h/%zz", "No valid URL specified"),
        ] {
            assert_eq!(told(name), options, "{name}");
        }
    }

    #[test]
    fn options_have_names() {
        for (text, name) in [
            ("path=/s", "nbd+unix://?socket=/s"),
            (
                "server.type=unix,server.path=/s,export=e",
                "nbd+unix:///e?socket=/s",
            ),
            ("host=h,port=1,export=e", "nbd://h:1/e"),
            ("server.host=h", "nbd://h:10809"),
            ("filename=nbd:h:1", "nbd://h:1"),
        ] {
            let options = Options::parse(text).unwrap();
            assert_eq!(name_of(&options).as_deref(), Some(name), "{text}");
        }
    }
}

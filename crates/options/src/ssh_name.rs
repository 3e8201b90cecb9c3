//! Names of files on other machines, `ssh://[USER@]HOST[:PORT]/PATH[?host_key_check=CHECK]`, to
//! options and back.

use vellum::{Error, ErrorKind, Result};

use crate::nbd_name::decode;
use crate::options::{Options, Scalar};

/// The protocol.
pub const SCHEME: &str = "ssh";
/// What the key of the host is compared with, in a name; as an option it is a group.
const CHECK: &str = "host_key_check";
const CHECK_GROUP: &str = "host-key-check.";

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

/// The options of the node that a name means.
///
/// # Errors
/// In QEMU's words for a name that means none.
pub fn options(name: &str) -> Result<Options> {
    let Some(rest) = name.strip_prefix("ssh://") else {
        return Err(invalid("URI scheme must be 'ssh'"));
    };
    let mut options = Options::new();
    options.set_text("driver", SCHEME);
    let broken = || invalid(format!("'{name}' is no URL of a file by ssh"));
    let rest = rest.split('#').next().unwrap_or_default();
    let (place, query) = match rest.split_once('?') {
        Some((place, query)) => (place, query),
        None => (rest, ""),
    };
    let Some(slash) = place.find('/') else {
        return Err(invalid("missing remote path in URI"));
    };
    let (authority, path) = place.split_at(slash);
    let (user, host) = match authority.rsplit_once('@') {
        Some((user, host)) => (Some(user), host),
        None => (None, authority),
    };
    let (host, port) = split_port(host).ok_or_else(broken)?;
    if host.is_empty() {
        return Err(invalid("missing hostname in URI"));
    }
    if let Some(user) = user.filter(|user| !user.is_empty()) {
        options.set_text("user", decode(user).ok_or_else(broken)?);
    }
    options.set_text("server.host", decode(host).ok_or_else(broken)?);
    if let Some(port) = port {
        options.set_text("server.port", port);
    }
    options.set_text("path", decode(path).ok_or_else(broken)?);
    for parameter in query.split('&') {
        if let Some((CHECK, value)) = parameter.split_once('=') {
            options.set_text(CHECK, decode(value).ok_or_else(broken)?);
        }
    }
    Ok(options)
}

/// The host, and the port if there is one.
fn split_port(host: &str) -> Option<(&str, Option<&str>)> {
    let (host, rest) = match host.strip_prefix('[') {
        Some(inner) => inner.split_once(']')?,
        None => match host.find(':') {
            Some(colon) => host.split_at(colon),
            None => (host, ""),
        },
    };
    match rest {
        "" | ":" => Some((host, None)),
        rest => Some((host, Some(rest.strip_prefix(':')?))),
    }
}

/// The URL, where it alone opens the same file again, and the options that say what is seen.
pub fn name_of(options: &Options) -> (Option<String>, Vec<(String, serde_json::Value)>) {
    let named = |key: &str| {
        matches!(key, "host" | "port" | "user" | "path" | CHECK)
            || key.starts_with("server.")
            || key.starts_with(CHECK_GROUP)
    };
    let json = options.iter().filter(|(key, _)| named(key));
    let json = json.map(|(key, value)| (key.to_owned(), value.clone().into()));
    (composed(options), json.collect())
}

fn composed(options: &Options) -> Option<String> {
    let sayable = |key: &str| matches!(key, "server.host" | "server.port");
    if options
        .keys()
        .any(|key| key.starts_with("server.") && !sayable(key))
    {
        return None;
    }
    let either = |key: &str| {
        let long = format!("server.{key}");
        let found = options
            .iter()
            .find(|(name, _)| *name == long || *name == key);
        found.map(|(_, value)| match value {
            Scalar::Text(text) => text.clone(),
            Scalar::Number(number) => number.to_string(),
            _ => String::new(),
        })
    };
    let host = either("host")?;
    let host = match host.contains(':') {
        true => format!("[{host}]"),
        false => encoded(&host),
    };
    let user = options
        .get_text("user")
        .map(|user| format!("{}@", encoded(user)));
    let port = either("port").map(|port| format!(":{port}"));
    let path = options
        .get_text("path")
        .filter(|path| path.starts_with('/'))?;
    let check = said_check(options)?.map(|check| format!("?{CHECK}={check}"));
    let parts = [user, Some(host), port, Some(encoded(path)), check];
    let parts: String = parts.into_iter().flatten().collect();
    Some(format!("ssh://{parts}"))
}

/// How a name says what the key is compared with; `None` if it cannot.
fn said_check(options: &Options) -> Option<Option<String>> {
    if let Some(check) = options.get_text(CHECK) {
        return Some(Some(check.to_owned()));
    }
    let text = |key: &str| options.get_text(&format!("{CHECK_GROUP}{key}"));
    Some(match text("mode") {
        None => None,
        Some("none") => Some("no".to_owned()),
        Some("known_hosts") => Some("yes".to_owned()),
        Some("hash") => Some(format!("{}:{}", text("type")?, text("hash")?)),
        Some(_) => return None,
    })
}

fn encoded(text: &str) -> String {
    let mut encoded = String::new();
    for letter in text.chars() {
        match letter {
            '%' | '?' | '#' | '@' | ' ' => encoded.push_str(&format!("%{:02x}", u32::from(letter))),
            letter => encoded.push(letter),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(name: &str) -> String {
        crate::options::told(options(name))
    }

    #[test]
    fn urls_become_options_and_urls_again() {
        for (name, wanted) in [
            ("ssh://h/a/b", "driver=ssh path=/a/b server.host=h"),
            (
                "ssh://me@h:2222/a%20b?host_key_check=no",
                "driver=ssh host_key_check=no path=/a b server.host=h server.port=2222 user=me",
            ),
            (
                "ssh://[::1]:7/x",
                "driver=ssh path=/x server.host=::1 server.port=7",
            ),
        ] {
            assert_eq!(told(name), wanted);
            assert_eq!(name_of(&options(name).unwrap()).0.as_deref(), Some(name));
        }
        for (name, wanted) in [
            ("ssh:h", "URI scheme must be 'ssh'"),
            ("ssh:///x", "missing hostname in URI"),
            ("ssh://h", "missing remote path in URI"),
        ] {
            assert_eq!(told(name), wanted);
        }
    }

    #[test]
    fn options_are_told_as_urls_where_these_can_say_them() {
        let name = |text: &str| name_of(&Options::parse(text).unwrap()).0;
        assert_eq!(
            name("host=h,port=7,path=/x").as_deref(),
            Some("ssh://h:7/x")
        );
        let hash = "server.host=h,path=/x,host-key-check.mode=hash,host-key-check.type=md5,\
                    host-key-check.hash=aa:bb";
        let wanted = "ssh://h/x?host_key_check=md5:aa:bb";
        assert_eq!(name(hash).as_deref(), Some(wanted));
        assert_eq!(name("server.host=h,server.ipv4=on,path=/x"), None);
    }
}

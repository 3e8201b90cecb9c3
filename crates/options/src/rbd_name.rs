//! Names of images on Ceph, `rbd:POOL/[NAMESPACE/]IMAGE[@SNAPSHOT][:KEY=VALUE...]`, to options and
//! back. A backslash takes from the next letter what it would mean.

use vellum::{Error, ErrorKind, Result};

use crate::options::{Options, Scalar};

/// The protocol.
pub const SCHEME: &str = "rbd";
/// An option that only names set: Ceph's own options, as a list of keys and values in JSON.
pub const PAIRS: &str = "=keyvalue-pairs";
/// Options that a name can say, with what they are called there.
const SAID: &[(&str, &str)] = &[("user", "id"), ("conf", "conf")];
/// Options that say what is seen and that no name can say.
const UNSAID: &[&str] = &["key-secret", "server.", "auth-client-required.", "encrypt."];

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

/// The options of the node that a name means.
///
/// # Errors
/// In QEMU's words for a name that means none.
pub fn options(name: &str) -> Result<Options> {
    let Some(rest) = name.strip_prefix("rbd:") else {
        return Err(invalid("File name must start with 'rbd:'"));
    };
    let mut options = Options::new();
    options.set_text("driver", SCHEME);
    let (place, settings) = split(rest, ':');
    let Some((pool, rest)) = split_at(place, '/') else {
        return Err(invalid("Pool name is required"));
    };
    options.set_text("pool", plain(pool));
    let (rest, snapshot) = split(rest, '@');
    let image = match split_at(rest, '/') {
        Some((namespace, image)) => {
            if !namespace.is_empty() {
                options.set_text("namespace", plain(namespace));
            }
            image
        }
        None => rest,
    };
    options.set_text("image", plain(image));
    if let Some(snapshot) = snapshot {
        options.set_text("snapshot", plain(snapshot));
    }
    take_settings(settings, &mut options)?;
    Ok(options)
}

fn take_settings(mut settings: Option<&str>, options: &mut Options) -> Result<()> {
    let mut pairs = Vec::new();
    while let Some(rest) = settings {
        let (setting, more) = split(rest, ':');
        settings = more;
        let Some((key, value)) = split_at(setting, '=') else {
            let key = plain(setting);
            return Err(invalid(format!("conf option {key} has no value")));
        };
        let (key, value) = (plain(key), plain(value));
        match SAID.iter().find(|(_, said)| *said == key) {
            Some((option, _)) => options.set_text(option, value),
            None => pairs.extend([key, value]),
        }
    }
    if !pairs.is_empty() {
        options.set_text(PAIRS, serde_json::Value::from(pairs).to_string());
    }
    Ok(())
}

/// Ceph's own options that a name has set.
///
/// # Errors
/// If somebody else has set them, in another way.
pub fn pairs(text: &str) -> Result<Vec<(String, String)>> {
    let list: Vec<String> =
        serde_json::from_str(text).map_err(|_| invalid("Invalid list of options of rbd"))?;
    let pairs = list
        .chunks_exact(2)
        .map(|pair| (pair[0].clone(), pair[1].clone()));
    Ok(pairs.collect())
}

/// What stands before the first `mark` that no backslash is before, and what stands behind it.
fn split_at(text: &str, mark: char) -> Option<(&str, &str)> {
    let mut escaped = false;
    for (at, letter) in text.char_indices() {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            letter if letter == mark => return Some((&text[..at], &text[at + mark.len_utf8()..])),
            _ => {}
        }
    }
    None
}

fn split(text: &str, mark: char) -> (&str, Option<&str>) {
    match split_at(text, mark) {
        Some((head, rest)) => (head, Some(rest)),
        None => (text, None),
    }
}

/// A part of a name without its backslashes.
fn plain(part: &str) -> String {
    let mut letters = part.chars();
    let mut plain = String::new();
    while let Some(letter) = letters.next() {
        plain.extend(match letter {
            '\\' => letters.next(),
            letter => Some(letter),
        });
    }
    plain
}

fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for letter in text.chars() {
        if matches!(letter, ':' | '@' | '=' | '\\') {
            escaped.push('\\');
        }
        escaped.push(letter);
    }
    escaped
}

/// The name, where it alone opens the same image again, and the options that say what is seen.
pub fn name_of(options: &Options) -> (Option<String>, Vec<(String, serde_json::Value)>) {
    let is_unsaid = |key: &str| {
        UNSAID
            .iter()
            .any(|known| key == *known || key.starts_with(known))
    };
    let named = |key: &str| {
        let place = ["pool", "namespace", "image", "snapshot", PAIRS];
        place.contains(&key) || SAID.iter().any(|(option, _)| *option == key) || is_unsaid(key)
    };
    let json = options.iter().filter(|(key, _)| named(key));
    let json = json.map(|(key, value)| (key.to_owned(), value.clone().into()));
    let plain = match options.keys().any(is_unsaid) {
        true => None,
        false => composed(options),
    };
    (plain, json.collect())
}

fn composed(options: &Options) -> Option<String> {
    let text = |key: &str| options.get_text(key).map(escaped);
    let mut name = format!("rbd:{}/", text("pool")?.replace('/', "\\/"));
    if let Some(namespace) = text("namespace").filter(|namespace| !namespace.is_empty()) {
        name.push_str(&format!("{}/", namespace.replace('/', "\\/")));
    }
    name.push_str(&text("image")?.replace('/', "\\/"));
    if let Some(snapshot) = text("snapshot") {
        name.push_str(&format!("@{snapshot}"));
    }
    for (option, said) in SAID {
        if let Some(value) = text(option) {
            name.push_str(&format!(":{said}={value}"));
        }
    }
    let pairs = options.iter().find(|(key, _)| *key == PAIRS);
    if let Some((_, Scalar::Text(list))) = pairs {
        let list: Vec<String> = serde_json::from_str(list).ok()?;
        for pair in list.chunks_exact(2) {
            name.push_str(&format!(":{}={}", escaped(&pair[0]), escaped(&pair[1])));
        }
    }
    Some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(name: &str) -> String {
        crate::options::told(options(name))
    }

    #[test]
    fn names_become_options_and_names_again() {
        for (name, wanted) in [
            ("rbd:p/i", "driver=rbd image=i pool=p"),
            (
                "rbd:p/n/i@s",
                "driver=rbd image=i namespace=n pool=p snapshot=s",
            ),
            (
                "rbd:p/i:id=me:conf=/etc/c\\:d.conf",
                "conf=/etc/c:d.conf driver=rbd image=i pool=p user=me",
            ),
            (
                "rbd:p/a\\@b:mon_host=h\\:1;k:key=x\\=",
                "=keyvalue-pairs=[\"mon_host\",\"h:1;k\",\"key\",\"x=\"] driver=rbd image=a@b pool=p",
            ),
        ] {
            assert_eq!(told(name), wanted);
            assert_eq!(name_of(&options(name).unwrap()).0.as_deref(), Some(name));
        }
        for (name, wanted) in [
            ("rbd:", "Pool name is required"),
            ("rbd:p", "Pool name is required"),
            ("rbd:p/i:x", "conf option x has no value"),
        ] {
            assert_eq!(told(name), wanted);
        }
    }

    #[test]
    fn what_no_name_can_say_is_told_as_json() {
        let name = |text: &str| name_of(&Options::parse(text).unwrap()).0;
        assert_eq!(
            name("pool=p,image=i,discard=unmap").as_deref(),
            Some("rbd:p/i")
        );
        assert_eq!(name("pool=p,image=i,server.0.host=h"), None);
        assert_eq!(name("pool=p,image=i,key-secret=k"), None);
        assert_eq!(name("pool=p,image=i,encrypt.format=luks"), None);
    }
}

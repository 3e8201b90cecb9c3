//! Options as flat dotted keys: `file.filename=x,cache.direct=on`.

use std::collections::BTreeMap;

use serde_json::Value;
use vellum::{Error, ErrorKind, Result};

use crate::size;

/// The value of one option. `--image-opts` gives text only; `json:` gives types.
#[derive(Debug, Clone, PartialEq)]
pub enum Scalar {
    /// Text.
    Text(String),
    /// A number of `json:`.
    Number(serde_json::Number),
    /// A boolean of `json:`.
    Bool(bool),
    /// `null` of `json:`.
    Null,
}

impl From<Scalar> for Value {
    fn from(scalar: Scalar) -> Value {
        match scalar {
            Scalar::Text(text) => Value::String(text),
            Scalar::Number(number) => Value::Number(number),
            Scalar::Bool(value) => Value::Bool(value),
            Scalar::Null => Value::Null,
        }
    }
}

/// Options by dotted key. Taking an option out marks it as understood; what is
/// left in the end is unknown.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Options {
    entries: BTreeMap<String, Scalar>,
}

/// So deep may a key lead, in dots: as a tree, options must stay JSON that can be read
/// again, and nobody walks deeper.
const MOST_LEVELS: usize = 100;

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, "parse options", message)
}

impl Options {
    /// No options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Parses `key=value,...`; `,,` stands for a comma in a value, a key alone
    /// means `key=on` (and `nokey` means `key=off`), as in QEMU.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a key with more than 100 dots.
    pub fn parse(text: &str) -> Result<Options> {
        Options::parse_with_implied(text, None)
    }

    /// Like [`Options::parse`]; a first word without `=` is the value of the key
    /// `implied`.
    ///
    /// # Errors
    /// As [`Options::parse`].
    pub fn parse_with_implied(text: &str, implied: Option<&str>) -> Result<Options> {
        let mut options = Options::new();
        let mut rest = text;
        if let Some(key) = implied
            && !text.is_empty()
            && !text[..text.find(',').unwrap_or(text.len())].contains('=')
        {
            let (value, after) = unescape(text);
            options.set_text(key, value);
            rest = after;
        }
        while !rest.is_empty() {
            let key_end = rest.find(['=', ',']).unwrap_or(rest.len());
            let key = &rest[..key_end];
            rest = &rest[key_end..];
            if let Some(value) = rest.strip_prefix('=') {
                let (value, after) = unescape(value);
                options.set(key, Scalar::Text(value));
                rest = after;
            } else {
                let (key, value) = match key.strip_prefix("no") {
                    Some(stem) if !stem.is_empty() => (stem, "off"),
                    _ => (key, "on"),
                };
                options.set(key, Scalar::Text(value.to_owned()));
                rest = rest.strip_prefix(',').unwrap_or(rest);
            }
        }
        options.checked()
    }

    /// Refuses keys that lead too deep.
    fn checked(self) -> Result<Options> {
        let deep = |key: &&String| key.matches('.').count() > MOST_LEVELS;
        match self.entries.keys().find(deep) {
            None => Ok(self),
            Some(key) => {
                let start: String = key.chars().take(32).collect();
                Err(invalid(format!(
                    "Option '{start}...' leads more than {MOST_LEVELS} levels deep"
                )))
            }
        }
    }

    /// Flattens the object of a `json:{...}` name.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for text that is no JSON or no object, and as
    /// [`Options::from_object`].
    pub fn from_json(text: &str) -> Result<Options> {
        let value: Value = serde_json::from_str(&double_quoted(text)).map_err(|error| {
            invalid(match error.is_eof() {
                true if text.trim().is_empty() => "Expecting a JSON value".to_owned(),
                true => "JSON parse error, premature EOI".to_owned(),
                false => format!("JSON parse error, {error}"),
            })
        })?;
        match value {
            Value::Object(members) => Options::from_object(members),
            _ => Err(invalid("Invalid JSON object given".into())),
        }
    }

    /// Flattens the members of an object.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a key with more than 100 dots.
    pub fn from_object(members: serde_json::Map<String, Value>) -> Result<Options> {
        let mut options = Options::new();
        options.flatten(None, Value::Object(members));
        options.checked()
    }

    fn flatten(&mut self, prefix: Option<&str>, value: Value) {
        let join = |key: &str| match prefix {
            None => key.to_owned(),
            Some(prefix) => format!("{prefix}.{key}"),
        };
        let scalar = match value {
            Value::Object(map) => {
                for (key, value) in map {
                    self.flatten(Some(&join(&key)), value);
                }
                return;
            }
            Value::Array(items) => {
                for (index, value) in items.into_iter().enumerate() {
                    self.flatten(Some(&join(&index.to_string())), value);
                }
                return;
            }
            Value::String(text) => Scalar::Text(text),
            Value::Number(number) => Scalar::Number(number),
            Value::Bool(value) => Scalar::Bool(value),
            Value::Null => Scalar::Null,
        };
        self.set(prefix.unwrap_or_default(), scalar);
    }

    /// Sets an option; the last one counts.
    pub fn set(&mut self, key: &str, value: Scalar) {
        self.entries.insert(key.to_owned(), value);
    }

    /// Sets an option to a text.
    pub fn set_text(&mut self, key: &str, value: impl Into<String>) {
        self.set(key, Scalar::Text(value.into()));
    }

    /// Whether an option is set.
    pub fn contains(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    /// The value of an option, left in place.
    pub fn get(&self, key: &str) -> Option<&Scalar> {
        self.entries.get(key)
    }

    /// A text, left in place.
    pub fn get_text(&self, key: &str) -> Option<&str> {
        match self.entries.get(key) {
            Some(Scalar::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// Takes an option out.
    pub fn take(&mut self, key: &str) -> Option<Scalar> {
        self.entries.remove(key)
    }

    /// Takes a text out.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a value that is no text.
    pub fn take_text(&mut self, key: &str) -> Result<Option<String>> {
        match self.take(key) {
            None => Ok(None),
            Some(Scalar::Text(text)) => Ok(Some(text)),
            Some(_) => Err(invalid(format!(
                "Invalid parameter type for '{key}', expected: string"
            ))),
        }
    }

    /// Takes a boolean out: `on`, `off`, or a boolean of JSON.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for any other value.
    pub fn take_bool(&mut self, key: &str) -> Result<Option<bool>> {
        let value = self.get_bool(key);
        self.take(key);
        value
    }

    /// As [`Options::take_bool`], left in place.
    ///
    /// # Errors
    /// As [`Options::take_bool`].
    pub fn get_bool(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Scalar::Bool(value)) => Ok(Some(*value)),
            Some(Scalar::Text(text)) => match text.as_str() {
                "on" | "yes" | "true" | "y" => Ok(Some(true)),
                "off" | "no" | "false" | "n" => Ok(Some(false)),
                _ => Err(invalid(format!("Parameter '{key}' expects 'on' or 'off'"))),
            },
            Some(_) => Err(invalid(format!(
                "Invalid parameter type for '{key}', expected: boolean"
            ))),
        }
    }

    /// Takes a plain number out.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for any other value.
    pub fn take_number(&mut self, key: &str) -> Result<Option<u64>> {
        let number = match self.take(key) {
            None => return Ok(None),
            Some(Scalar::Number(number)) => number.as_u64(),
            Some(Scalar::Text(text)) => parse_number(&text),
            Some(_) => None,
        };
        match number {
            Some(number) => Ok(Some(number)),
            None => Err(invalid(format!("Parameter '{key}' expects a number"))),
        }
    }

    /// Takes a size out: a number with an optional suffix.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for any other value, and a size that does not fit into 64
    /// bits.
    pub fn take_size(&mut self, key: &str) -> Result<Option<u64>> {
        match self.take(key) {
            None => Ok(None),
            Some(Scalar::Number(number)) => match number.as_u64() {
                Some(value) => Ok(Some(value)),
                None => Err(invalid(format!("Parameter '{key}' expects uint64"))),
            },
            Some(Scalar::Text(text)) => size_value(key, &text).map(Some),
            Some(_) => Err(invalid(format!("Parameter '{key}' expects a size"))),
        }
    }

    /// Takes out everything under `prefix.`, with the prefix cut off.
    pub fn take_group(&mut self, prefix: &str) -> Options {
        let start = format!("{prefix}.");
        let keys: Vec<String> = self
            .entries
            .keys()
            .filter(|key| key.starts_with(&start))
            .cloned()
            .collect();
        let entries = keys
            .into_iter()
            .filter_map(|key| {
                let value = self.entries.remove(&key)?;
                Some((key[start.len()..].to_owned(), value))
            })
            .collect();
        Options { entries }
    }

    /// Puts options under `prefix.`.
    pub fn set_group(&mut self, prefix: &str, group: Options) {
        for (key, value) in group.entries {
            self.entries.insert(format!("{prefix}.{key}"), value);
        }
    }

    /// The options as a tree of JSON objects.
    pub fn to_json(&self) -> Value {
        let mut tree = serde_json::Map::new();
        for (key, value) in self.iter() {
            let mut parts: Vec<&str> = key.split('.').collect();
            let last = parts.pop().unwrap_or_default();
            let mut branch = &mut tree;
            for part in parts {
                let below = branch
                    .entry(part)
                    .or_insert_with(|| Value::Object(Default::default()));
                let Value::Object(inner) = below else {
                    return Value::Null;
                };
                branch = inner;
            }
            branch.insert(last.to_owned(), value.clone().into());
        }
        Value::Object(tree)
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The keys that are left.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// All entries.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Scalar)> {
        self.entries
            .iter()
            .map(|(key, value)| (key.as_str(), value))
    }
}

/// JSON with its strings in double quotes: QEMU takes single quotes too.
pub fn double_quoted(text: &str) -> String {
    let mut standard = String::with_capacity(text.len());
    let mut quote = None;
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match (quote, letter) {
            (None, '"' | '\'') => {
                quote = Some(letter);
                standard.push('"');
            }
            (Some(open), _) if letter == open => {
                quote = None;
                standard.push('"');
            }
            (Some(_), '"') => standard.push_str("\\\""),
            (Some(_), '\\') => match letters.next() {
                Some('\'') => standard.push('\''),
                escaped => {
                    standard.push('\\');
                    standard.extend(escaped);
                }
            },
            _ => standard.push(letter),
        }
    }
    standard
}

/// Whether a text is a size but for its sign.
fn is_negative(text: &str) -> bool {
    let positive = text.trim_start().strip_prefix('-');
    positive.is_some_and(|text| size::parse(text).is_ok())
}

/// A decimal or hexadecimal number; a negative one wraps around, as in C.
fn parse_number(text: &str) -> Option<u64> {
    if let Some(positive) = text.strip_prefix('-') {
        return Some(parse_number(positive)?.wrapping_neg());
    }
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The words of a list that is separated by commas, with `,,` turned into `,`.
pub fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (word, after) = unescape(rest);
        words.push(word);
        rest = after;
    }
    words
}

/// The value up to a single comma, with `,,` turned into `,`, and what follows.
fn unescape(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut rest = text;
    loop {
        let Some(comma) = rest.find(',') else {
            value.push_str(rest);
            return (value, "");
        };
        value.push_str(&rest[..comma]);
        rest = &rest[comma + 1..];
        match rest.strip_prefix(',') {
            Some(after) => {
                value.push(',');
                rest = after;
            }
            None => return (value, rest),
        }
    }
}

/// The size that the text of an option gives, with QEMU's words for what is wrong.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for what is no size, or does not fit into 64 bits.
pub fn size_value(key: &str, text: &str) -> Result<u64> {
    size::parse(text).map_err(|error| match error {
        size::SizeError::Invalid if !is_negative(text) => invalid(format!(
            "Parameter '{key}' expects a non-negative number below 2^64\n\
             Optional suffix k, M, G, T, P or E means kilo-, mega-, giga-, tera-, peta-\n\
             and exabytes, respectively."
        )),
        _ => invalid(format!(
            "Value '{text}' is out of range for parameter '{key}'"
        )),
    })
}

/// Options as tests write them, or what is wrong with what they were to be read from.
#[cfg(test)]
pub(crate) fn told(options: Result<Options>) -> String {
    match options {
        Err(error) => error.message().to_owned(),
        Ok(options) => {
            let words = options.iter().map(|(key, value)| match value {
                Scalar::Text(text) => format!("{key}={text}"),
                other => format!("{key}={other:?}"),
            });
            words.collect::<Vec<_>>().join(" ")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_key_value_lists() {
        let mut options = Options::parse("driver=qcow2,file.filename=a,,b,ro,nofoo,x=").unwrap();
        assert_eq!(
            options.take_text("driver").unwrap().as_deref(),
            Some("qcow2")
        );
        assert_eq!(
            options.take_text("file.filename").unwrap().as_deref(),
            Some("a,b")
        );
        assert_eq!(options.take_bool("ro").unwrap(), Some(true));
        assert_eq!(options.take_bool("foo").unwrap(), Some(false));
        assert_eq!(options.take_text("x").unwrap().as_deref(), Some(""));
        assert!(options.is_empty());
    }

    #[test]
    fn flattens_json() {
        let text =
            r#"{"driver":"qcow2","file":{"driver":"file","filename":"x"},"l2-cache-size":1}"#;
        let mut options = Options::from_json(text).unwrap();
        let mut file = options.take_group("file");
        assert_eq!(file.take_text("filename").unwrap().as_deref(), Some("x"));
        assert_eq!(options.take_size("l2-cache-size").unwrap(), Some(1));
        let mut single = Options::from_json(r#"{'a': 'it\'s "so"', "b": "don't"}"#).unwrap();
        let taken = |value: Result<Option<String>>| value.unwrap().unwrap();
        assert_eq!(taken(single.take_text("a")), "it's \"so\"");
        assert_eq!(taken(single.take_text("b")), "don't");
        let nested = Options::from_json(r#"{"":{"a":1},"b":[2,{"c":3}]}"#).unwrap();
        assert_eq!(nested.keys().collect::<Vec<_>>(), [".a", "b.0", "b.1.c"]);
        assert!(Options::from_json("[1]").is_err());
        assert!(Options::from_json("{").is_err());
    }

    #[test]
    fn keys_lead_only_so_deep() {
        let key = |levels: usize| format!("a{}", ".b".repeat(levels));
        let json = |levels: usize| format!(r#"{{"{}":1}}"#, key(levels));
        let deepest = Options::from_json(&json(MOST_LEVELS)).unwrap();
        let again = Options::from_json(&deepest.to_json().to_string());
        assert_eq!(again.unwrap(), deepest);
        for refused in [
            Options::from_json(&json(MOST_LEVELS + 1)),
            Options::parse(&format!("{}=1", key(1 << 20))),
        ] {
            let message = refused.unwrap_err().message().to_owned();
            assert!(message.ends_with("more than 100 levels deep"), "{message}");
        }
    }

    #[test]
    fn bad_values_are_named() {
        let mut options = Options::parse("a=maybe,b=1x").unwrap();
        let error = options.take_bool("a").unwrap_err();
        assert_eq!(error.message(), "Parameter 'a' expects 'on' or 'off'");
        assert!(options.take_size("b").is_err());
        let mut options = Options::parse("c=-1k").unwrap();
        let error = options.take_size("c").unwrap_err();
        assert_eq!(
            error.message(),
            "Value '-1k' is out of range for parameter 'c'"
        );
    }
}

//! Options of `create -o`: how one is described, texts that list them, and values that were given ([`CreateSettings`]).
//! Which options a format has is said where its images are made.

use std::collections::BTreeMap;
use std::fmt::Write;

use vellum::{Error, ErrorKind, Result};

use crate::options::{Options, Scalar, words};

/// The type of a creation option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionType {
    /// Any text.
    Text,
    /// `on` or `off`.
    Bool,
    /// A number.
    Number,
    /// A number of bytes with an optional suffix.
    Size,
}

/// One creation option of a format.
#[derive(Debug, Clone, Copy)]
pub struct OptionDescription {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: OptionType,
    /// What it does, in the words that `-o help` prints.
    pub help: &'static str,
    /// The value that stands where none is given, if it is always shown.
    pub default: Option<&'static str>,
}

/// An option of these properties.
pub const fn option(
    name: &'static str,
    kind: OptionType,
    help: &'static str,
    default: Option<&'static str>,
) -> OptionDescription {
    OptionDescription {
        name,
        kind,
        help,
        default,
    }
}

use OptionType::{Bool, Number, Size, Text};

/// The option `size`, which every format has.
pub const SIZE: OptionDescription = option("size", Size, "Virtual disk size", None);
/// The option `backing_file` of formats that have backing files.
pub const BACKING_FILE: OptionDescription =
    option("backing_file", Text, "File name of a base image", None);
/// The option `backing_fmt` of formats that name the format of their backing file.
pub const BACKING_FORMAT: OptionDescription =
    option("backing_fmt", Text, "Image format of the base image", None);

/// The list that `-o help` prints.
pub fn help_text(options: &[OptionDescription]) -> String {
    let mut sorted = options.to_vec();
    sorted.sort_by_key(|option| option.name);
    let mut text = String::new();
    for option in sorted {
        let kind = match option.kind {
            Text => "str",
            Bool => "bool (on/off)",
            Number => "num",
            Size => "size",
        };
        let head = format!("  {}=<{kind}>", option.name);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{head:<24} - {}", option.help);
    }
    text
}

/// Whether `-o` texts ask for the list of options.
pub fn asks_for_help(text: &str) -> bool {
    words(text).iter().any(|word| word == "help" || word == "?")
}

/// Whether a text can be joined to others of its kind: it is not empty, begins
/// with no comma, and leaves none open at its end.
pub fn is_option_list(text: &str) -> bool {
    let open_at_end = text.chars().rev().take_while(|&c| c == ',').count() % 2 == 1;
    !text.is_empty() && !open_at_end && !text.starts_with(',')
}

/// A value that was given.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Given {
    Text(String),
    Bool(bool, String),
    Integer(u64),
}

/// Creation options with their values, checked against their types.
#[derive(Debug, Clone)]
pub struct CreateSettings {
    descriptions: Vec<OptionDescription>,
    given: BTreeMap<&'static str, Given>,
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, "parse options", message)
}

impl CreateSettings {
    /// Settings of these options, all at their defaults.
    pub fn of(descriptions: Vec<OptionDescription>) -> Self {
        CreateSettings {
            descriptions,
            given: BTreeMap::new(),
        }
    }

    /// Takes a `-o` text in.
    ///
    /// # Errors
    /// As [`CreateSettings::set`].
    pub fn parse(&mut self, text: &str) -> Result<()> {
        let options = Options::parse(text)?;
        for (key, value) in options.iter() {
            let Scalar::Text(value) = value else { continue };
            self.set(key, value)?;
        }
        Ok(())
    }

    /// Sets one option from its text.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for an option that the format does not have, and a value
    /// that does not fit its type.
    pub fn set(&mut self, name: &str, text: &str) -> Result<()> {
        let Some(description) = self.descriptions.iter().find(|known| known.name == name) else {
            return Err(invalid(format!("Invalid parameter '{name}'")));
        };
        let mut one = Options::new();
        one.set_text(name, text);
        let given = match description.kind {
            Text => Given::Text(text.to_owned()),
            Bool => Given::Bool(one.take_bool(name)?.unwrap_or(false), text.to_owned()),
            Size => Given::Integer(one.take_size(name)?.unwrap_or(0)),
            Number => Given::Integer(one.take_number(name)?.unwrap_or(0)),
        };
        self.given.insert(description.name, given);
        Ok(())
    }

    /// Whether the format has an option.
    pub fn knows(&self, name: &str) -> bool {
        self.descriptions.iter().any(|known| known.name == name)
    }

    /// Whether an option was given.
    pub fn is_given(&self, name: &str) -> bool {
        self.given.contains_key(name)
    }

    /// A text option: what was given, or its default.
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.given.get(name) {
            Some(Given::Text(text)) => Some(text),
            Some(_) => None,
            None => self.default(name),
        }
    }

    /// A boolean option.
    pub fn bool(&self, name: &str) -> bool {
        match self.given.get(name) {
            Some(Given::Bool(value, _)) => *value,
            _ => self.default(name) == Some("on"),
        }
    }

    /// A size or number.
    pub fn integer(&self, name: &str) -> Option<u64> {
        match self.given.get(name) {
            Some(Given::Integer(value)) => Some(*value),
            Some(_) => None,
            None => self.default(name).and_then(|text| text.parse().ok()),
        }
    }

    fn default(&self, name: &str) -> Option<&'static str> {
        self.descriptions
            .iter()
            .find(|known| known.name == name)
            .and_then(|known| known.default)
    }

    /// All values in their order, as the line `Formatting ...` shows them.
    pub fn summary(&self) -> String {
        let mut words = Vec::new();
        for description in &self.descriptions {
            let name = description.name;
            match (self.given.get(name), description.default) {
                (Some(Given::Text(text)), _) => {
                    words.push(format!("{name}={}", text.replace(',', ",,")));
                }
                (Some(Given::Bool(_, text)), _) => words.push(format!("{name}={text}")),
                (Some(Given::Integer(value)), _) => words.push(format!("{name}={}", *value as i64)),
                (None, Some(default)) => words.push(format!("{name}={default}")),
                (None, None) => {}
            }
        }
        words.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_with_open_commas_are_refused() {
        for good in ["a", "a,b", "a,,"] {
            assert!(is_option_list(good), "{good}");
        }
        for bad in ["", ",", ",,", "a,", ",a", "a,,,"] {
            assert!(!is_option_list(bad), "{bad}");
        }
    }
}

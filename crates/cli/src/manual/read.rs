//! Takes the text of a help apart. Pure.

use crate::getopt::{Shape, Takes};

/// An option as a help tells of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explained {
    /// With their dashes: `-f`, `--format`.
    pub names: Vec<String>,
    /// The word that stands for its value.
    pub value: Option<String>,
    /// What it means.
    pub about: String,
}

/// How an option is written, with dashes.
pub fn names(shape: &Shape) -> Vec<String> {
    let short = shape.short.map(|letter| format!("-{letter}"));
    let long = shape.long.map(|name| format!("--{name}"));
    short.into_iter().chain(long).collect()
}

/// The options that a help tells of. Their shapes say which of them take a value, since
/// that word and the explanation look alike.
pub fn options(help: &str, shapes: &[Shape]) -> Vec<Explained> {
    let mut found: Vec<Explained> = Vec::new();
    let mut indent = 0;
    let mut open = false;
    for line in help.lines() {
        let words = line.trim_start();
        let at = line.len() - words.len();
        if words.starts_with('-') {
            found.push(option(words, shapes));
            (indent, open) = (at, true);
        } else if open && at > indent + 6 {
            if let Some(last) = found.last_mut() {
                if !last.about.is_empty() {
                    last.about.push(' ');
                }
                last.about.push_str(words);
            }
        } else {
            open = false;
        }
    }
    merge(found)
}

/// An option that is told of twice is one with both explanations.
fn merge(found: Vec<Explained>) -> Vec<Explained> {
    let mut merged: Vec<Explained> = Vec::new();
    for option in found {
        match merged.iter_mut().find(|other| other.names == option.names) {
            Some(other) if !option.about.is_empty() => {
                other.about = format!("{} {}", other.about, option.about)
                    .trim()
                    .to_owned();
            }
            Some(_) => {}
            None => merged.push(option),
        }
    }
    merged
}

fn option(line: &str, shapes: &[Shape]) -> Explained {
    let mut rest = line;
    let mut names = Vec::new();
    let mut value = None;
    while rest.starts_with('-') {
        let end = rest.find([' ', ',', '=', '[']).unwrap_or(rest.len());
        names.push(rest[..end].to_owned());
        rest = &rest[end..];
        if let Some(after) = rest.strip_prefix("[=").or_else(|| rest.strip_prefix('=')) {
            let end = after.find(' ').unwrap_or(after.len());
            value = Some(after[..end].trim_end_matches(']').to_owned());
            rest = &after[end..];
        }
        // Two spaces and more lead to the explanation.
        match rest.strip_prefix(", ") {
            Some(next) => rest = next,
            None => break,
        }
    }
    let takes = shapes.iter().any(|shape| {
        let own = self::names(shape);
        shape.takes != Takes::Nothing && names.iter().any(|name| own.contains(name))
    });
    let single = rest.starts_with(' ') && !rest.starts_with("  ");
    if takes && value.is_none() && single {
        let words = rest.trim_start();
        let end = words.find(' ').unwrap_or(words.len());
        value = Some(words[..end].to_owned());
        rest = &words[end..];
    }
    Explained {
        names,
        value,
        about: rest.trim().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPES: &[Shape] = &[
        Shape {
            short: Some('f'),
            long: Some("format"),
            takes: Takes::Value,
        },
        Shape {
            short: None,
            long: Some("force"),
            takes: Takes::Nothing,
        },
        Shape {
            short: None,
            long: Some("size"),
            takes: Takes::Value,
        },
    ];

    fn explained(names: &[&str], value: Option<&str>, about: &str) -> Explained {
        Explained {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            value: value.map(str::to_owned),
            about: about.to_owned(),
        }
    }

    #[test]
    fn helps_are_taken_apart() {
        let help = "Usage: x\n\n  -f, --format FMT  the format\n                    of it\n  \
                    --force           do it\n  --size=SIZE       how much\nNo option.\n  \
                    -f, --format FMT again\n  FILE   a file\n";
        let expected = [
            explained(&["-f", "--format"], Some("FMT"), "the format of it again"),
            explained(&["--force"], None, "do it"),
            explained(&["--size"], Some("SIZE"), "how much"),
        ];
        assert_eq!(options(help, SHAPES), expected);
    }
}

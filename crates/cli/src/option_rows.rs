//! Options as rows of text, written as a help shows them: `-f, --format FMT  the format of the image`.
//!
//! Names are separated by a comma, the word for the value follows a single space or `=`, and what the option means
//! follows two spaces or more. That word also says which values completions offer (`manual/complete.rs`). Lines
//! that are indented by more than six columns continue a row; rows that do not begin with a dash are operands or
//! headings.

use crate::getopt::OptionSpec;

/// Two texts with a space between them, if there are two.
pub fn join(one: &str, other: &str) -> String {
    let gap = if one.is_empty() || other.is_empty() {
        ""
    } else {
        " "
    };
    format!("{one}{gap}{other}")
}

/// The options among the rows of a text.
pub fn options_in(text: &'static str) -> Vec<OptionSpec> {
    let mut found: Vec<OptionSpec> = Vec::new();
    // Where the row begins that goes on, and how many options it has.
    let mut open = None;
    for line in text.lines() {
        let words = line.trim_start();
        let at = line.len() - words.len();
        match open {
            _ if words.starts_with('-') => {
                let row = row(words);
                open = Some((at, row.len()));
                found.extend(row);
            }
            Some((indent, count)) if at > indent + 6 => {
                let from = found.len() - count;
                for option in &mut found[from..] {
                    option.about = join(&option.about, words);
                }
            }
            _ => open = None,
        }
    }
    found
}

/// The options of one row: several if it has more than one long name.
fn row(line: &'static str) -> Vec<OptionSpec> {
    let mut rest = line;
    let mut options: Vec<OptionSpec> = Vec::new();
    while rest.starts_with('-') {
        let end = rest.find([' ', ',', '=']).unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        let long = name.strip_prefix("--");
        let id = long.unwrap_or(&name[1..]);
        match options.last_mut() {
            Some(last) if last.long.is_none() && long.is_some() => {
                (last.id, last.long) = (id, long)
            }
            _ => options.push(OptionSpec {
                id,
                short: if long.is_some() {
                    None
                } else {
                    id.chars().next()
                },
                long,
                value: None,
                about: String::new(),
            }),
        }
        rest = after.strip_prefix(", ").unwrap_or(after);
    }
    let is_value = rest.starts_with('=') || rest.starts_with(' ') && !rest.starts_with("  ");
    let (value, about) = match is_value && rest.len() > 1 {
        true => rest[1..].split_at(rest[1..].find(' ').unwrap_or(rest.len() - 1)),
        false => ("", rest),
    };
    for option in &mut options {
        option.value = (!value.is_empty()).then_some(value);
        option.about = about.trim().to_owned();
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    fn option(
        names: (Option<char>, Option<&'static str>),
        value: Option<&'static str>,
        about: &str,
    ) -> OptionSpec {
        OptionSpec {
            id: names.1.unwrap_or("?"),
            short: names.0,
            long: names.1,
            value,
            about: about.to_owned(),
        }
    }

    #[test]
    fn rows_are_options() {
        let rows = "Usage: x\n\n  -f, --format FMT  the format\n                    of it\n  \
                    --force           do it\n  --size=SIZE       how much\nNo option.\n  \
                    FILE   a file\n --on, --off X  both\n";
        let expected = [
            option((Some('f'), Some("format")), Some("FMT"), "the format of it"),
            option((None, Some("force")), None, "do it"),
            option((None, Some("size")), Some("SIZE"), "how much"),
            option((None, Some("on")), Some("X"), "both"),
            option((None, Some("off")), Some("X"), "both"),
        ];
        assert_eq!(options_in(rows), expected);
    }
}

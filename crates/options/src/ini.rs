//! Configuration files as QEMU reads them: `[group]` or `[group "id"]` lines, and
//! `key = "value"` lines below them. Lines that begin with `#` are comments.

use vellum::{Error, ErrorKind, Result};

use crate::options::Options;

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "parse configuration", message)
}

/// The groups of a file in their order, each with its options. Only groups of `known`
/// names may stand there.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] in QEMU's words.
pub fn parse(text: &str, known: &[&'static str]) -> Result<Vec<(&'static str, Options)>> {
    let mut groups: Vec<(&'static str, Options)> = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(head) = line.strip_prefix('[') {
            groups.push((group_name(head, known)?, Options::new()));
            continue;
        }
        let Some((key, value)) = assignment(line) else {
            return Err(invalid("parse error"));
        };
        let Some((_, group)) = groups.last_mut() else {
            return Err(invalid("no group defined"));
        };
        group.set_text(key, value);
    }
    Ok(groups)
}

/// The name in what follows a `[`.
fn group_name(head: &str, known: &[&'static str]) -> Result<&'static str> {
    let Some((words, _)) = head.split_once(']') else {
        return Err(invalid("parse error"));
    };
    let name = words.split_whitespace().next().unwrap_or_default();
    let found = known.iter().find(|known| **known == name);
    found
        .copied()
        .ok_or_else(|| invalid(format!("There is no option group '{name}'")))
}

/// Key and value of `key = "value"`.
fn assignment(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.split_once('=')?;
    let value = value.trim().strip_prefix('"')?;
    Some((key.trim(), value.split_once('"')?.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_keep_their_order_and_options() {
        let text = "# a comment\n[b]\nevent = \"l1_update\"\n errno =\"28\"\n\
                    \n[a \"id\"]\nevent = \"none\"\n[b]\n";
        let groups = parse(text, &["a", "b"]).unwrap();
        let names: Vec<_> = groups.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["b", "a", "b"]);
        assert_eq!(groups[0].1.get_text("errno"), Some("28"));
        assert_eq!(groups[1].1.get_text("event"), Some("none"));
        assert!(groups[2].1.is_empty());
    }

    #[test]
    fn wrong_lines_are_refused() {
        for (text, message) in [
            ("[a", "parse error"),
            ("[c]", "There is no option group 'c'"),
            ("[]", "There is no option group ''"),
            ("a = \"b\"", "no group defined"),
            ("[a]\nevent = none", "parse error"),
            ("[a]\nevent = \"none", "parse error"),
        ] {
            assert_eq!(parse(text, &["a"]).unwrap_err().message(), message);
        }
    }
}

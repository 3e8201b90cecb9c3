//! Who may come in: `authz-simple`, `authz-list`, `authz-list-file`.

use std::sync::Arc;

use vellum::{Error, ErrorKind, Result};
use vellum_options::Options;
use vellum_tls::Authorizer;

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "make object", message)
}

/// Makes the authorizer of a type.
pub(crate) fn make(kind: &str, options: &mut Options) -> Result<Arc<dyn Authorizer>> {
    match kind {
        "authz-simple" => {
            let identity = options.take_text("identity")?;
            let identity = identity.ok_or_else(|| missing("identity"))?;
            Ok(Arc::new(List {
                rules: vec![Rule {
                    pattern: identity,
                    format: Format::Exact,
                    allow: true,
                }],
                otherwise: false,
            }))
        }
        "authz-list" => Ok(Arc::new(List::take(options)?)),
        _ => {
            let filename = options.take_text("filename")?;
            let filename = filename.ok_or_else(|| missing("filename"))?;
            // Read anew for everybody who wants to come in.
            options.take_bool("refresh")?;
            List::read(&filename)?;
            Ok(Arc::new(ListFile { filename }))
        }
    }
}

fn missing(key: &str) -> Error {
    invalid(format!("Parameter '{key}' is missing"))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Exact,
    /// `*` and `?` stand for others.
    Glob,
}

#[derive(Debug)]
struct Rule {
    pattern: String,
    format: Format,
    allow: bool,
}

/// Rules, of which the first that fits decides.
#[derive(Debug)]
struct List {
    rules: Vec<Rule>,
    otherwise: bool,
}

/// A list in a file, as JSON.
#[derive(Debug)]
struct ListFile {
    filename: String,
}

fn take_policy(options: &mut Options) -> Result<Option<bool>> {
    match options.take_text("policy")?.as_deref() {
        None => Ok(None),
        Some("allow") => Ok(Some(true)),
        Some("deny") => Ok(Some(false)),
        Some(other) => Err(invalid(format!(
            "Parameter 'policy' does not accept value '{other}'"
        ))),
    }
}

impl List {
    fn take(options: &mut Options) -> Result<List> {
        let otherwise = take_policy(options)?.unwrap_or(false);
        let mut rules = Vec::new();
        loop {
            let mut rule = options.take_group(&format!("rules.{}", rules.len()));
            if rule.is_empty() {
                return Ok(List { rules, otherwise });
            }
            let pattern = rule.take_text("match")?;
            let format = match rule.take_text("format")?.as_deref() {
                None | Some("exact") => Format::Exact,
                Some("glob") => Format::Glob,
                Some(other) => {
                    return Err(invalid(format!(
                        "Parameter 'format' does not accept value '{other}'"
                    )));
                }
            };
            let policy = take_policy(&mut rule)?;
            if let Some(key) = rule.keys().next() {
                return Err(invalid(format!("Parameter '{key}' is unexpected")));
            }
            rules.push(Rule {
                pattern: pattern.ok_or_else(|| missing("match"))?,
                format,
                allow: policy.ok_or_else(|| missing("policy"))?,
            });
        }
    }

    fn read(filename: &str) -> Result<List> {
        let text = std::fs::read_to_string(filename).map_err(|cause| {
            let reason = Error::from_io("read", &cause);
            invalid(format!(
                "Unable to read '{filename}': Failed to open file “{filename}”: {}",
                reason.message()
            ))
        })?;
        let mut options = Options::from_json(&text)?;
        let list = List::take(&mut options)?;
        // Rules that are not understood must not be left out: they may keep somebody away.
        match options.keys().next() {
            None => Ok(list),
            Some(key) => Err(invalid(format!(
                "'{filename}': Parameter '{key}' is unexpected"
            ))),
        }
    }
}

impl Authorizer for List {
    fn is_allowed(&self, identity: &str) -> Result<bool> {
        let decides = |rule: &&Rule| match rule.format {
            Format::Exact => rule.pattern == identity,
            Format::Glob => matches(rule.pattern.as_bytes(), identity.as_bytes()),
        };
        let rule = self.rules.iter().find(decides);
        Ok(rule.map_or(self.otherwise, |rule| rule.allow))
    }
}

impl Authorizer for ListFile {
    fn is_allowed(&self, identity: &str) -> Result<bool> {
        List::read(&self.filename)?.is_allowed(identity)
    }
}

/// Whether a text is as a pattern with `*` and `?` says.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut in_text) = (0, 0);
    // Where the last `*` stands, and what of the text it takes.
    let mut star: Option<(usize, usize)> = None;
    while in_text < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, in_text));
                at += 1;
            }
            Some(&letter) if letter == b'?' || letter == text[in_text] => {
                at += 1;
                in_text += 1;
            }
            _ => {
                let Some((place, taken)) = star else {
                    return false;
                };
                star = Some((place, taken + 1));
                (at, in_text) = (place + 1, taken + 1);
            }
        }
    }
    pattern[at..].iter().all(|letter| *letter == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(kind: &str, text: &str, identity: &str) -> bool {
        let mut options = Options::parse(text).unwrap();
        make(kind, &mut options)
            .unwrap()
            .is_allowed(identity)
            .unwrap()
    }

    #[test]
    fn the_first_rule_that_fits_decides() {
        assert!(allowed("authz-simple", "identity=CN=a,,O=b", "CN=a,O=b"));
        assert!(!allowed("authz-simple", "identity=CN=a", "CN=ab"));
        let list = "policy=deny,rules.0.match=CN=bad*,rules.0.policy=deny,rules.0.format=glob,\
                    rules.1.match=CN=*,rules.1.policy=allow,rules.1.format=glob";
        assert!(allowed("authz-list", list, "CN=good"));
        assert!(!allowed("authz-list", list, "CN=bad one"));
        assert!(!allowed("authz-list", list, "O=good"));
        assert!(allowed("authz-list", "policy=allow", "anybody"));
    }

    /// What is left out might be what keeps somebody away.
    #[test]
    fn a_file_with_what_is_not_understood_lets_nobody_in() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            std::fs::write(&file, text).unwrap();
            List::read(&file.path().to_string_lossy())
        };
        let deny = r#"{"match":"CN=bad","policy":"deny"}"#;
        let good = read(&format!(r#"{{"policy":"allow","rules":[{deny}]}}"#)).unwrap();
        assert!(!good.is_allowed("CN=bad").unwrap());
        for (text, key) in [
            (
                format!(r#"{{"policy":"allow","rule":[{deny}]}}"#),
                "rule.0.match",
            ),
            (
                format!(r#"{{"policy":"allow","rules":[{{}},{deny}]}}"#),
                "rules.1.match",
            ),
            (
                format!(r#"{{"policy":"allow","rules":{{"x":{deny}}}}}"#),
                "rules.x.match",
            ),
            (r#"{"policy":"allow","rules":"none"}"#.to_owned(), "rules"),
        ] {
            let error = read(&text).unwrap_err();
            let unexpected = format!("Parameter '{key}' is unexpected");
            assert!(error.message().ends_with(&unexpected), "{text}: {error}");
            let listed = ListFile {
                filename: file.path().to_string_lossy().into_owned(),
            };
            assert!(listed.is_allowed("CN=good").is_err(), "{text}");
        }
    }

    #[test]
    fn patterns_have_stars_and_question_marks() {
        for (pattern, text, fits) in [
            ("*", "", true),
            ("a*c", "abbbc", true),
            ("a*c", "abcb", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*b*b", "abab", true),
            ("", "a", false),
        ] {
            assert_eq!(
                matches(pattern.as_bytes(), text.as_bytes()),
                fits,
                "{pattern} {text}"
            );
        }
    }
}

//! Whether what somebody asks for is such as a type has it, in the words of QEMU's visitors.
//!
//! QEMU looks at all of a value before it does anything with it: members in the order of the
//! declaration, then the members that are left over. What is wrong within a member is told by
//! its whole way, but a word that an enumeration does not have by its own name alone.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde_json::{Map, Value};

use super::parse::{Declaration, Kind, Member, declarations};
use super::{TYPES, values};

static DECLARED: LazyLock<BTreeMap<String, Declaration>> = LazyLock::new(|| {
    let all = declarations(TYPES).into_iter();
    all.map(|one| (one.name.clone(), one)).collect()
});

/// The type of the options of a node.
pub(crate) const BLOCKDEV: &str = "BlockdevAddOptions";
/// The type of the options of an export.
pub(crate) const EXPORT: &str = "BlockExportAddOptions";

/// How a value was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notation {
    /// JSON, where each value has its type.
    Json,
    /// `key=value,...`: all values are text, and lists are objects with numbers for names.
    KeyValue,
}

/// Looks at the options of a node.
///
/// # Errors
/// What QEMU says of what is wrong first.
pub(crate) fn check_blockdev(value: &Value, notation: Notation) -> Result<(), String> {
    Checker(notation).check(BLOCKDEV, value, &Way::default())
}

/// Looks at the options of an export, written as JSON.
///
/// # Errors
/// What QEMU says of what is wrong first.
pub(crate) fn check_export(value: &Value) -> Result<(), String> {
    Checker(Notation::Json).check(EXPORT, value, &Way::default())
}

/// The names of the members of a type, and of its variant of that value.
pub(crate) fn member_names(type_name: &str, value: &str) -> Vec<String> {
    let Some(Kind::Object { members, tag }) = DECLARED.get(type_name).map(|one| &one.kind) else {
        return Vec::new();
    };
    let variants = tag.iter().flat_map(|(_, variants)| variants);
    let variant = variants.filter(|(known, _)| known == value);
    let more = variant.filter_map(|(_, name)| match &DECLARED.get(name)?.kind {
        Kind::Object { members, .. } => Some(members),
        _ => None,
    });
    let all = members.iter().chain(more.flatten());
    all.map(|member| member.name.clone()).collect()
}

/// Where in a value something is.
#[derive(Debug, Clone, Default)]
struct Way {
    whole: String,
    last: String,
}

impl Way {
    fn member(&self, name: &str) -> Way {
        let whole = match self.whole.is_empty() {
            true => name.to_owned(),
            false => format!("{}.{name}", self.whole),
        };
        Way {
            whole,
            last: name.to_owned(),
        }
    }
}

struct Checker(Notation);

impl Checker {
    fn check(&self, type_name: &str, value: &Value, way: &Way) -> Result<(), String> {
        let wrong = |expected: &str| {
            let whole = &way.whole;
            Err(format!(
                "Invalid parameter type for '{whole}', expected: {expected}"
            ))
        };
        if let Some(inner) = type_name.strip_prefix('[') {
            return self.check_list(inner.trim_end_matches(']'), value, way);
        }
        let is_text = self.0 == Notation::KeyValue && value.is_string();
        match type_name {
            "any" => Ok(()),
            "str" if value.is_string() => Ok(()),
            "str" => wrong("string"),
            "bool" if is_text => match value.as_str() {
                Some("on" | "off" | "yes" | "no" | "true" | "false" | "y" | "n") => Ok(()),
                _ => Err(format!("Parameter '{}' expects 'on' or 'off'", way.whole)),
            },
            "bool" if value.is_boolean() => Ok(()),
            "bool" => wrong("boolean"),
            // Which texts are numbers, and which sizes, drivers know.
            "int" | "number" if is_text => Ok(()),
            "int" if value.is_i64() || value.is_u64() => Ok(()),
            "int" => wrong("integer"),
            "number" if value.is_number() => Ok(()),
            "number" => wrong("number"),
            _ => match DECLARED.get(type_name).map(|declared| &declared.kind) {
                Some(Kind::Enum(words)) => match value.as_str() {
                    None => wrong("string"),
                    Some(word) if values(type_name, words).iter().any(|one| one == word) => Ok(()),
                    Some(word) => Err(format!(
                        "Parameter '{}' does not accept value '{word}'",
                        way.last
                    )),
                },
                Some(Kind::Alternate(types)) => {
                    match types.iter().find(|one| is_possible(one, value)) {
                        Some(found) => self.check(found, value, way),
                        None => wrong(type_name),
                    }
                }
                Some(Kind::Object { members, tag }) => match value.as_object() {
                    Some(object) => self.check_object(members, tag.as_ref(), object, way),
                    None => wrong("object"),
                },
                Some(Kind::Call { .. }) | None => Ok(()),
            },
        }
    }

    fn check_list(&self, inner: &str, value: &Value, way: &Way) -> Result<(), String> {
        let at = |index: usize| match self.0 {
            Notation::Json => format!("{}[{index}]", way.whole),
            Notation::KeyValue => format!("{}.{index}", way.whole),
        };
        let items: Vec<&Value> = match value {
            Value::Array(items) => items.iter().collect(),
            Value::Object(object) if self.0 == Notation::KeyValue && are_numbers(object) => {
                let mut items = Vec::with_capacity(object.len());
                for index in 0..object.len() {
                    match object.get(&index.to_string()) {
                        Some(item) => items.push(item),
                        None => return Err(format!("Parameter '{}' missing", at(index))),
                    }
                }
                items
            }
            _ => {
                let whole = &way.whole;
                return Err(format!(
                    "Invalid parameter type for '{whole}', expected: array"
                ));
            }
        };
        for (index, item) in items.into_iter().enumerate() {
            let way = Way {
                whole: at(index),
                last: way.last.clone(),
            };
            self.check(inner, item, &way)?;
        }
        Ok(())
    }

    fn check_object(
        &self,
        members: &[Member],
        tag: Option<&(String, Vec<(String, String)>)>,
        object: &Map<String, Value>,
        way: &Way,
    ) -> Result<(), String> {
        self.check_members(members, object, way)?;
        let variant = tag.and_then(|(tag, variants)| {
            let value = object.get(tag)?.as_str()?;
            let (_, type_name) = variants.iter().find(|(known, _)| known == value)?;
            match &DECLARED.get(type_name)?.kind {
                Kind::Object { members, .. } => Some(members),
                _ => None,
            }
        });
        let more: &[Member] = variant.map_or(&[], |members| members);
        self.check_members(more, object, way)?;
        let is_known = |key: &str| {
            let mut known = members.iter().chain(more);
            known.any(|member| member.name == key)
        };
        match object.keys().find(|key| !is_known(key)) {
            None => Ok(()),
            Some(key) => Err(format!(
                "Parameter '{}' is unexpected",
                way.member(key).whole
            )),
        }
    }

    fn check_members(
        &self,
        members: &[Member],
        object: &Map<String, Value>,
        way: &Way,
    ) -> Result<(), String> {
        for member in members {
            let way = way.member(&member.name);
            match object.get(&member.name) {
                Some(value) => self.check(&member.type_name, value, &way)?,
                None if member.is_optional => {}
                None => return Err(format!("Parameter '{}' is missing", way.whole)),
            }
        }
        Ok(())
    }
}

fn are_numbers(object: &Map<String, Value>) -> bool {
    object.keys().all(|key| key.parse::<usize>().is_ok())
}

/// Whether a value can be meant as one of a type that an alternate offers.
fn is_possible(type_name: &str, value: &Value) -> bool {
    match type_name {
        "null" => value.is_null(),
        "str" => value.is_string(),
        "bool" => value.is_boolean(),
        "int" => value.is_number(),
        _ => match DECLARED.get(type_name).map(|declared| &declared.kind) {
            Some(Kind::Enum(_)) => value.is_string(),
            Some(Kind::Object { .. }) => value.is_object(),
            _ => false,
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refusal(value: Value, notation: Notation) -> String {
        check_blockdev(&value, notation).expect_err("it is wrong")
    }

    #[test]
    fn what_is_wrong_first_is_told_by_its_whole_way() {
        let file = json!({"driver": "file", "filename": "a"});
        let qcow2 = |key: &str, value: Value| {
            let mut options = json!({"driver": "qcow2", "node-name": "n", "file": file});
            options[key] = value;
            options
        };
        let cases = [
            (json!({"driver": "qcow2"}), "Parameter 'file' is missing"),
            (
                qcow2("file", json!({"filename": "a"})),
                "Parameter 'file.driver' is missing",
            ),
            (
                qcow2("file", json!(3)),
                "Invalid parameter type for 'file', expected: BlockdevRef",
            ),
            (
                qcow2("cache", json!({"directly": true})),
                "Parameter 'cache.directly' is unexpected",
            ),
            (
                qcow2("discard", json!("no")),
                "Parameter 'discard' does not accept value 'no'",
            ),
            (
                json!({"driver": "blkdebug", "image": "a", "inject-error": [{"event": "none", "errno": "x"}]}),
                "Invalid parameter type for 'inject-error[0].errno', expected: integer",
            ),
        ];
        for (value, expected) in cases {
            assert_eq!(refusal(value, Notation::Json), expected);
        }
        assert_eq!(
            check_blockdev(&qcow2("backing", Value::Null), Notation::Json),
            Ok(())
        );
    }

    #[test]
    fn on_the_command_line_every_value_is_a_text() {
        let with = |key: &str, value: Value| {
            let mut options = json!({"driver": "blkdebug", "image": "a"});
            options[key] = value;
            options
        };
        let rules = json!({"0": {"event": "none", "errno": "5"}, "1": {"event": "none"}});
        for value in [with("inject-error", rules), with("read-only", json!("on"))] {
            assert_eq!(check_blockdev(&value, Notation::KeyValue), Ok(()));
        }
        let refused = refusal(with("read-only", json!("1")), Notation::KeyValue);
        assert_eq!(refused, "Parameter 'read-only' expects 'on' or 'off'");
        let rules = json!({"1": {"event": "none"}});
        let refused = refusal(with("inject-error", rules), Notation::KeyValue);
        assert_eq!(refused, "Parameter 'inject-error.0' missing");
    }
}

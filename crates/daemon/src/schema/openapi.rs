//! The declarations as JSON Schema (2020-12), which OpenAPI 3.1 speaks.
//!
//! `rest.txt` declares, in the same language, what no QMP command tells.

use serde_json::{Map, Value, json};

use super::parse::{Declaration, Kind, Member, declarations};
use super::{COMMANDS, TYPES, values};

const REST: &str = include_str!("rest.txt");

/// Where the document keeps types.
const PLACE: &str = "#/components/schemas/";

/// The names and types of what a command is given.
pub(crate) fn argument_types(command: &str) -> Vec<(String, String)> {
    let members = members(command).into_iter();
    members
        .map(|member| (member.name, member.type_name))
        .collect()
}

/// What a command is given, without its variants.
fn members(command: &str) -> Vec<Member> {
    let declared = declarations(COMMANDS).into_iter();
    let Some(Kind::Call { argument, .. }) = find(declared, command).map(|found| found.kind) else {
        return Vec::new();
    };
    let type_name = match argument {
        Err(members) => return members,
        Ok(type_name) => type_name,
    };
    match find(declarations(TYPES).into_iter(), &type_name).map(|found| found.kind) {
        Some(Kind::Object { members, .. }) => members,
        _ => Vec::new(),
    }
}

fn find(mut all: impl Iterator<Item = Declaration>, name: &str) -> Option<Declaration> {
    all.find(|declared| declared.name == name)
}

/// The schema of what a command is given, but for arguments that something else says (`without`) and
/// those that may be left out (`optional`); and whether anything must be given.
pub(crate) fn arguments(command: &str, without: &[&str], optional: &[&str]) -> (Value, bool) {
    let declared = find(declarations(COMMANDS).into_iter(), command).map(|found| found.kind);
    if let Some(Kind::Call {
        argument: Ok(type_name),
        ..
    }) = &declared
        && without.is_empty()
        && optional.is_empty()
    {
        let is_needed = members(command).iter().any(|member| !member.is_optional);
        return (reference(type_name), is_needed);
    }
    let mut left = members(command);
    left.retain(|member| !without.contains(&member.name.as_str()));
    for member in &mut left {
        member.is_optional |= optional.contains(&member.name.as_str());
    }
    let is_needed = left.iter().any(|member| !member.is_optional);
    (Value::Object(object(&left)), is_needed)
}

/// The schema of what a command gives back.
pub(crate) fn result(command: &str) -> Value {
    match find(declarations(COMMANDS).into_iter(), command).map(|found| found.kind) {
        Some(Kind::Call {
            result: Some(type_name),
            ..
        }) => of_type(&type_name),
        _ => json!({"type": "object"}),
    }
}

/// The schema of a type by its name: `str`, `[int]`, `Disk`.
pub(crate) fn of_type(type_name: &str) -> Value {
    if let Some(inner) = type_name.strip_prefix('[') {
        return json!({"type": "array", "items": of_type(inner.trim_end_matches(']'))});
    }
    match type_name {
        "any" => json!({}),
        "bool" => json!({"type": "boolean"}),
        "int" => json!({"type": "integer"}),
        "null" => json!({"type": "null"}),
        "number" => json!({"type": "number"}),
        "str" => json!({"type": "string"}),
        _ => reference(type_name),
    }
}

fn reference(type_name: &str) -> Value {
    json!({"$ref": format!("{PLACE}{type_name}")})
}

/// All types, by their names.
pub(crate) fn components() -> Map<String, Value> {
    let types = declarations(TYPES);
    let all = types
        .iter()
        .chain(&declarations(REST))
        .cloned()
        .collect::<Vec<_>>();
    let schema = |declared: &Declaration| {
        let mut schema = match &declared.kind {
            Kind::Enum(words) => {
                let values = values(&declared.name, words);
                Map::from_iter([
                    ("type".to_owned(), json!("string")),
                    ("enum".to_owned(), json!(values)),
                ])
            }
            Kind::Alternate(types) => {
                let types: Vec<Value> = types.iter().map(|one| of_type(one)).collect();
                Map::from_iter([("anyOf".to_owned(), json!(types))])
            }
            Kind::Object { members, tag } => {
                let mut object = object(members);
                if let Some((tag, variants)) = tag {
                    let variants: Vec<Value> = variants
                        .iter()
                        .map(|(value, type_name)| variant(tag, value, type_name))
                        .collect();
                    // A value without a variant has no members of its own.
                    object.insert("allOf".to_owned(), json!(variants));
                }
                object
            }
            Kind::Call { .. } => Map::new(),
        };
        deprecate(&mut schema, &declared.features);
        (declared.name.clone(), Value::Object(schema))
    };
    all.iter().map(schema).collect()
}

/// What holds where a tag has a value.
fn variant(tag: &str, value: &str, type_name: &str) -> Value {
    json!({
        "if": {"properties": {tag: {"const": value}}, "required": [tag]},
        "then": reference(type_name),
    })
}

fn object(members: &[Member]) -> Map<String, Value> {
    let property = |member: &Member| {
        let mut schema = of_type(&member.type_name);
        if let Value::Object(schema) = &mut schema {
            deprecate(schema, &member.features);
        }
        (member.name.clone(), schema)
    };
    let properties: Map<String, Value> = members.iter().map(property).collect();
    let required = members.iter().filter(|member| !member.is_optional);
    let required: Vec<&str> = required.map(|member| member.name.as_str()).collect();
    let mut object = Map::from_iter([
        ("type".to_owned(), json!("object")),
        ("properties".to_owned(), Value::Object(properties)),
    ]);
    if !required.is_empty() {
        object.insert("required".to_owned(), json!(required));
    }
    object
}

fn deprecate(schema: &mut Map<String, Value>, features: &[String]) {
    if features.iter().any(|feature| feature == "deprecated") {
        schema.insert("deprecated".to_owned(), json!(true));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_type_of_the_interface_has_the_name_of_one_of_qmp() {
        let types = declarations(TYPES);
        for own in declarations(REST) {
            let is_known = types.iter().any(|one| one.name == own.name);
            assert!(!is_known, "{}", own.name);
        }
    }

    #[test]
    fn what_a_path_says_is_no_argument_any_more() {
        let (schema, is_needed) = arguments("block_resize", &["node-name"], &[]);
        assert!(is_needed);
        assert_eq!(schema["required"], json!(["size"]));
        assert!(schema["properties"].get("node-name").is_none());
        let (_, is_needed) = arguments("block_resize", &["node-name"], &["size"]);
        assert!(!is_needed);
        let (whole, _) = arguments("blockdev-add", &[], &[]);
        assert_eq!(
            whole,
            json!({"$ref": "#/components/schemas/BlockdevAddOptions"})
        );
    }
}

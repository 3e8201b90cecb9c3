//! The OpenAPI document: every row of the table, with the schemas of what it takes and gives.

use std::sync::OnceLock;

use serde_json::{Map, Value, json};

use crate::{commands, schema};

use super::routes::{Method, ROUTES, Route, Serves, Source};

const JSON: &str = "application/json";
const ABOUT: &str = "Disks, exports and jobs of a daemon. Whatever QMP can do is at \
    /v1/qmp/{command}; the other paths are for what is done most. Failures are told as RFC 9457 has \
    it, with QMP's class and words.";

/// The document as text. It is made once: whoever asks for it again and again gets the same.
pub(super) fn text() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| document().to_string())
}

/// The document.
fn document() -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for route in ROUTES {
        let place = paths.entry(route.path).or_insert_with(|| json!({}));
        place[route.method.name().to_lowercase()] = operation(route);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Vellum",
            "version": env!("CARGO_PKG_VERSION"),
            "description": ABOUT,
            "license": {"name": "Apache-2.0 OR MIT", "identifier": "Apache-2.0 OR MIT"},
        },
        "paths": paths,
        "components": {
            "schemas": schema::components(),
            "responses": {
                "Problem": {
                    "description": "Why not",
                    "content": {"application/problem+json": {"schema": schema::of_type("Problem")}},
                },
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    })
}

fn operation(route: &Route) -> Value {
    let mut parameters: Vec<Value> = route
        .parameters()
        .map(|name| path_parameter(route, name))
        .collect();
    let mut operation = json!({"operationId": id(route), "summary": route.summary});
    match (route.serves, route.method) {
        (Serves::Command(command, fixed), Method::Post) => {
            let (mut schema, is_needed) = command_arguments(command, fixed);
            if !route.one_of.is_empty() {
                let one = route.one_of.iter().map(|name| json!({"required": [name]}));
                schema["anyOf"] = one.collect();
            }
            let is_needed = is_needed || !route.one_of.is_empty();
            operation["description"] = json!(format!("QMP: `{command}`"));
            operation["requestBody"] = json!({
                "required": is_needed,
                "content": {JSON: {"schema": schema}},
            });
        }
        (Serves::Command(command, fixed), _) => {
            operation["description"] = json!(format!("QMP: `{command}`"));
            parameters.extend(query_parameters(command, fixed));
        }
        (Serves::AnyCommand, _) => {
            operation["requestBody"] = json!({"content": {JSON: {"schema": {"type": "object"}}}});
        }
        _ => {}
    }
    if !parameters.is_empty() {
        operation["parameters"] = json!(parameters);
    }
    operation["responses"] = json!({
        "200": answer(route.serves),
        "default": {"$ref": "#/components/responses/Problem"},
    });
    operation
}

/// A name for programs: `post_v1_disks_node_resize`.
fn id(route: &Route) -> String {
    let words = route
        .path
        .split(|letter: char| !letter.is_ascii_alphanumeric());
    let words = words.filter(|word| !word.is_empty());
    let method = route.method.name().to_lowercase();
    std::iter::once(method.as_str())
        .chain(words)
        .collect::<Vec<_>>()
        .join("_")
}

fn path_parameter(route: &Route, name: &str) -> Value {
    let schema = match route.serves {
        Serves::AnyCommand => {
            let names = commands::names();
            let names = names.into_iter().filter(|name| *name != "qmp_capabilities");
            json!({"type": "string", "enum": names.collect::<Vec<_>>()})
        }
        _ => json!({"type": "string"}),
    };
    json!({"name": name, "in": "path", "required": true, "schema": schema})
}

/// The arguments that a path says, and those that may be left out.
fn fixed_names(fixed: &[(&'static str, Source)]) -> (Vec<&'static str>, Vec<&'static str>) {
    let is_default = |source: &Source| matches!(source, Source::Text(_));
    let (optional, without): (Vec<_>, Vec<_>) =
        fixed.iter().partition(|(_, source)| is_default(source));
    let names =
        |pairs: Vec<&(&'static str, Source)>| pairs.into_iter().map(|(name, _)| *name).collect();
    (names(without), names(optional))
}

fn command_arguments(command: &str, fixed: &[(&'static str, Source)]) -> (Value, bool) {
    let (without, optional) = fixed_names(fixed);
    schema::arguments(command, &without, &optional)
}

fn query_parameters(command: &str, fixed: &[(&'static str, Source)]) -> Vec<Value> {
    let (schema, _) = command_arguments(command, fixed);
    let (without, _) = fixed_names(fixed);
    let names = schema::argument_types(command).into_iter();
    let left = names.filter(|(name, _)| !without.contains(&name.as_str()));
    left.map(|(name, _)| {
        let required = schema["required"].as_array();
        let required = required.is_some_and(|all| all.iter().any(|one| *one == name));
        json!({
            "name": name,
            "in": "query",
            "required": required,
            "schema": schema["properties"][&name],
        })
    })
    .collect()
}

fn answer(serves: Serves) -> Value {
    let (kind, schema) = match serves {
        Serves::Page => ("text/html", json!({"type": "string"})),
        Serves::Document => (JSON, json!({"type": "object"})),
        Serves::Metrics => ("text/plain", json!({"type": "string"})),
        Serves::View(view) => (JSON, schema::of_type(view.result())),
        Serves::Command(command, _) => (JSON, schema::result(command)),
        Serves::AnyCommand => (JSON, json!({})),
    };
    json!({"description": "Done", "content": {kind: {"schema": schema}}})
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_row_is_described_and_every_name_leads_somewhere() {
        let document = document();
        let mut ids = BTreeSet::new();
        for route in ROUTES {
            let method = route.method.name().to_lowercase();
            let operation = &document["paths"][route.path][&method];
            assert_eq!(operation["summary"], route.summary, "{}", route.path);
            assert!(
                ids.insert(operation["operationId"].to_string()),
                "{}",
                route.path
            );
            let described = operation["parameters"].as_array().into_iter().flatten();
            let in_path = described.filter(|one| one["in"] == "path").count();
            assert_eq!(in_path, route.parameters().count(), "{}", route.path);
        }
        check_references(&document, &document);
    }

    fn check_references(value: &Value, document: &Value) {
        if let Some(Value::String(reference)) = value.get("$ref") {
            let pointer = reference.strip_prefix('#').expect("within the document");
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
        match value {
            Value::Array(items) => items
                .iter()
                .for_each(|item| check_references(item, document)),
            Value::Object(members) => {
                members
                    .values()
                    .for_each(|item| check_references(item, document));
            }
            _ => {}
        }
    }
}

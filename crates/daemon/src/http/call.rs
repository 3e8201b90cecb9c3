//! [`understand`]: what a request asks for. Nothing is known of the daemon here, so that a fuzzer can
//! ask anything.

use serde_json::{Map, Value};

use crate::schema;

use super::problem::Problem;
use super::routes::{Method, ROUTES, Route, Serves, Source, View};
use super::target::Target;
use super::{Request, is_read};

/// What a request asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Call {
    /// The page for people.
    Page,
    /// The OpenAPI document.
    Document,
    /// Metrics.
    Metrics,
    /// A view, and the node that it is about.
    View(View, Option<String>),
    /// A QMP command with its arguments.
    Command(String, Map<String, Value>),
}

/// Finds out what a request asks for.
///
/// # Errors
/// The refusal of a request that asks for nothing that there is, or not as it should.
pub fn understand(request: &Request) -> Result<Call, Problem> {
    let target = Target::parse(&request.target).map_err(|why| Problem::new(400, why))?;
    let matching = ROUTES.iter().filter_map(|route| {
        let arguments = route.matches(&target.segments)?;
        Some((route, arguments))
    });
    let matching: Vec<_> = matching.collect();
    if matching.is_empty() {
        let detail = "There is nothing at this path; GET /openapi.json lists what there is";
        return Err(Problem::new(404, detail));
    }
    let is_asked = |route: &Route| match route.method {
        Method::Get => is_read(&request.method),
        other => other.name() == request.method,
    };
    let Some((route, path)) = matching.iter().find(|(route, _)| is_asked(route)) else {
        return Err(not_allowed(matching.iter().map(|(route, _)| route.method)));
    };
    Ok(match route.serves {
        Serves::Page => Call::Page,
        Serves::Document => Call::Document,
        Serves::Metrics => Call::Metrics,
        Serves::View(view) => {
            let node = path.iter().find(|(name, _)| *name == "node");
            Call::View(view, node.map(|(_, node)| (*node).to_owned()))
        }
        Serves::Command(command, fixed) => {
            let said = said(request, &target, route.method, command)?;
            check_one_of(&said, route.one_of)?;
            Call::Command(command.to_owned(), complete(said, fixed, path)?)
        }
        Serves::AnyCommand => {
            let named = path.first().map_or("", |(_, name)| *name);
            Call::Command(named.to_owned(), body(request, &target)?)
        }
    })
}

fn not_allowed(methods: impl Iterator<Item = Method>) -> Problem {
    let mut methods: Vec<Method> = methods.collect();
    methods.sort_unstable();
    let names = methods.into_iter().map(|method| match method {
        Method::Get => "GET, HEAD",
        other => other.name(),
    });
    let names = names.collect::<Vec<_>>().join(", ");
    Problem {
        allow: Some(names.clone()),
        ..Problem::new(405, format!("This path has the methods {names}"))
    }
}

/// The arguments that a request says.
fn said(
    request: &Request,
    target: &Target,
    method: Method,
    command: &str,
) -> Result<Map<String, Value>, Problem> {
    if method == Method::Post {
        return body(request, target);
    }
    if !request.body.is_empty() {
        return Err(Problem::new(
            400,
            "Arguments belong into the query, not into a body",
        ));
    }
    let types = schema::argument_types(command);
    let mut arguments = Map::new();
    for (key, text) in &target.query {
        let known = types.iter().find(|(name, _)| name == key);
        let value = typed(known.map_or("str", |(_, type_name)| type_name), text);
        let wrong = || Problem::new(400, format!("The query has a wrong value for '{key}'"));
        arguments.insert(key.clone(), value.ok_or_else(wrong)?);
    }
    Ok(arguments)
}

/// Text as a value of a type.
fn typed(type_name: &str, text: &str) -> Option<Value> {
    match (type_name, text) {
        ("int", _) => text.parse::<i64>().ok().map(Value::from),
        ("bool", "true" | "on") => Some(true.into()),
        ("bool", "false" | "off") => Some(false.into()),
        ("bool", _) => None,
        _ => Some(text.into()),
    }
}

fn body(request: &Request, target: &Target) -> Result<Map<String, Value>, Problem> {
    if !target.query.is_empty() {
        return Err(Problem::new(
            400,
            "Arguments belong into the body, not into a query",
        ));
    }
    if request.body.is_empty() {
        return Ok(Map::new());
    }
    let kind = request.content_type.as_deref().unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    // A form of another page could send any other kind without asking.
    if !kind.eq_ignore_ascii_case("application/json") {
        return Err(Problem::new(
            415,
            "The body is JSON: Content-Type: application/json",
        ));
    }
    match serde_json::from_slice(&request.body) {
        Ok(Value::Object(members)) => Ok(members),
        Ok(_) => Err(Problem::new(400, "The body is no JSON object")),
        Err(why) => Err(Problem::new(400, format!("The body is no JSON: {why}"))),
    }
}

/// Refuses a request that says none of some arguments.
fn check_one_of(said: &Map<String, Value>, names: &[&str]) -> Result<(), Problem> {
    let is_said = |name: &&str| said.get(*name).is_some_and(|value| !value.is_null());
    if names.is_empty() || names.iter().any(is_said) {
        return Ok(());
    }
    let names: Vec<String> = names.iter().map(|name| format!("'{name}'")).collect();
    let detail = format!(
        "The body has to have {}: this changes only what is named",
        names.join(" or ")
    );
    Err(Problem::new(400, detail))
}

/// Adds what the path and the row say.
fn complete(
    mut arguments: Map<String, Value>,
    fixed: &[(&str, Source)],
    path: &[(&str, &str)],
) -> Result<Map<String, Value>, Problem> {
    for (key, source) in fixed {
        let is_said = arguments.contains_key(*key);
        let value = match source {
            Source::Text(_) if is_said => continue,
            Source::Text(text) => filled(text, path).into(),
            Source::Path(_) | Source::Switch(_) if is_said => {
                let detail = format!("The path says '{key}' already");
                return Err(Problem::new(400, detail));
            }
            Source::Path(name) => {
                let found = path.iter().find(|(known, _)| known == name);
                found.map_or("", |(_, value)| *value).into()
            }
            Source::Switch(switch) => (*switch).into(),
        };
        arguments.insert((*key).to_owned(), value);
    }
    Ok(arguments)
}

/// A text with the path's arguments in it. What cannot stand in an id becomes `_`.
fn filled(text: &str, path: &[(&str, &str)]) -> String {
    let mut filled = text.to_owned();
    for (name, value) in path {
        let fits = |letter: char| letter.is_ascii_alphanumeric() || "-._".contains(letter);
        let value = value
            .chars()
            .map(|letter| if fits(letter) { letter } else { '_' });
        filled = filled.replace(&format!("{{{name}}}"), &value.collect::<String>());
    }
    filled
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn request(method: &str, target: &str, body: &str) -> Request {
        Request {
            method: method.to_owned(),
            target: target.to_owned(),
            content_type: Some("application/json; charset=utf-8".to_owned()),
            body: body.as_bytes().to_vec(),
            ..Request::default()
        }
    }

    fn command(method: &str, target: &str, body: &str) -> (String, Value) {
        match understand(&request(method, target, body)) {
            Ok(Call::Command(name, arguments)) => (name, arguments.into()),
            other => panic!("{method} {target}: {other:?}"),
        }
    }

    fn refusal(method: &str, target: &str, body: &str) -> Problem {
        understand(&request(method, target, body)).expect_err(target)
    }

    #[test]
    fn arguments_come_from_path_body_query_and_row() {
        for (method, target, body, name, arguments) in [
            ("GET", "/v1/jobs", "", "query-jobs", json!({})),
            (
                "GET",
                "/v1/nodes",
                "",
                "query-named-block-nodes",
                json!({"flat": true}),
            ),
            (
                "POST",
                "/v1/disks/d/resize",
                r#"{"size": 5}"#,
                "block_resize",
                json!({"size": 5, "node-name": "d"}),
            ),
            (
                "POST",
                "/v1/disks/%23block001/mirror",
                r#"{"target": "t"}"#,
                "drive-mirror",
                json!({"target": "t", "device": "#block001", "job-id": "mirror-_block001",
                    "sync": "full"}),
            ),
            (
                "POST",
                "/v1/disks/d/backup",
                r#"{"target": "t", "job-id": "j", "sync": "top"}"#,
                "drive-backup",
                json!({"target": "t", "job-id": "j", "sync": "top", "device": "d"}),
            ),
            (
                "DELETE",
                "/v1/exports/e?mode=hard",
                "",
                "block-export-del",
                json!({"mode": "hard", "id": "e"}),
            ),
            (
                "POST",
                "/v1/disks/d/commit",
                r#"{"base-node": "golden"}"#,
                "block-commit",
                json!({"base-node": "golden", "device": "d", "job-id": "commit-d"}),
            ),
            ("POST", "/v1/qmp/quit", "", "quit", json!({})),
            ("POST", "/v1/qmp/x", r#"{"a": [1]}"#, "x", json!({"a": [1]})),
        ] {
            assert_eq!(command(method, target, body), (name.to_owned(), arguments));
        }
        let view = understand(&request("HEAD", "/v1/disks/d", ""));
        assert_eq!(view, Ok(Call::View(View::Disk, Some("d".to_owned()))));
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for (method, target, body, status) in [
            ("GET", "/v2", "", 404),
            ("GET", "/v1", "", 404),
            ("GET", "/v1/disks/../jobs", "", 400),
            ("PUT", "/v1/jobs", "", 405),
            ("GET", "/v1/disks/d/resize", "", 405),
            ("OPTIONS", "/v1/nodes", "", 405),
            ("POST", "/v1/disks/d/resize", r#"{"node-name": "x"}"#, 400),
            ("POST", "/v1/disks/d/resize?size=1", "", 400),
            ("POST", "/v1/disks/d/resize", "[1]", 400),
            ("POST", "/v1/disks/d/resize", "{", 400),
            // The lowest image may be one that others stand on.
            ("POST", "/v1/disks/d/commit", "", 400),
            ("POST", "/v1/disks/d/commit", r#"{"base-node": null}"#, 400),
            ("DELETE", "/v1/nodes/n", "{}", 400),
            ("GET", "/v1/nodes?flat=false", "", 400),
        ] {
            assert_eq!(
                refusal(method, target, body).status,
                status,
                "{method} {target}"
            );
        }
        let deep = "[".repeat(100_000);
        assert_eq!(refusal("POST", "/v1/nodes", &deep).status, 400);
        let problem = refusal("DELETE", "/v1/exports", "");
        assert_eq!(problem.allow.as_deref(), Some("GET, HEAD, POST"));
        let mut form = request("POST", "/v1/nodes", "{}");
        form.content_type = Some("text/plain".to_owned());
        assert_eq!(understand(&form).expect_err("a form").status, 415);
    }

    #[test]
    fn text_of_a_query_has_the_type_of_its_argument() {
        assert_eq!(typed("int", "-5"), Some(json!(-5)));
        assert_eq!(typed("int", "5x"), None);
        assert_eq!(typed("bool", "on"), Some(json!(true)));
        assert_eq!(typed("bool", "maybe"), None);
        assert_eq!(typed("str", "5"), Some(json!("5")));
    }
}

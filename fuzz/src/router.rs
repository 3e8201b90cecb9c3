//! A request of HTTP that says anything, as far as it is understood before anything is done.

use std::fmt::Write;

use vellum_daemon::http::{Call, Method, ROUTES, Request, Serves, Target, understand};

/// The first line is the method and the path with the query, the second one the type of the body, the
/// rest the body.
///
/// Invariants:
/// - no bytes make the router panic; what it refuses has a status that says who is to blame;
/// - a path that is taken leads nowhere: no part of it is empty, `.` or `..`, or holds a slash or a
///   control character; written again it is the same;
/// - a command is one that a row of the table names, unless the path names it, and has the path's
///   arguments as they stand there;
/// - nothing is changed by a method that only asks.
pub fn check_router(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut lines = text.splitn(3, '\n');
    let (first, kind) = (lines.next().unwrap_or_default(), lines.next());
    let (method, target) = first.split_once(' ').unwrap_or(("GET", first));
    let request = Request {
        method: method.to_owned(),
        target: target.to_owned(),
        content_type: kind.map(str::to_owned),
        body: lines.next().unwrap_or_default().as_bytes().to_vec(),
        ..Request::default()
    };
    let parsed = Target::parse(target);
    if let Ok(parsed) = &parsed {
        check_target(parsed);
    }
    match understand(&request) {
        Err(problem) => {
            assert!((400..500).contains(&problem.status), "{problem:?}");
            assert!(!problem.detail.is_empty());
        }
        Ok(call) => {
            let parsed = parsed.expect("a path that is understood");
            check_call(&request, &parsed, &call);
        }
    }
}

fn check_target(target: &Target) {
    for segment in &target.segments {
        assert!(!matches!(segment.as_str(), "" | "." | ".."));
        let leads = |letter: char| matches!(letter, '/' | '\\') || letter.is_control();
        assert!(!segment.contains(leads), "{segment:?}");
    }
    let written: Vec<String> = target.segments.iter().map(|part| escaped(part)).collect();
    let pairs = target.query.iter();
    let pairs: Vec<String> = pairs
        .map(|(key, value)| format!("{}={}", escaped(key), escaped(value)))
        .collect();
    let again = format!("/{}?{}", written.join("/"), pairs.join("&"));
    // Escapes may make it longer than what is taken.
    if let Ok(again) = Target::parse(&again) {
        assert_eq!(again, *target);
    }
}

fn escaped(text: &str) -> String {
    text.bytes().fold(String::new(), |mut escaped, byte| {
        // Writing to a string cannot fail.
        let _ = write!(escaped, "%{byte:02x}");
        escaped
    })
}

fn check_call(request: &Request, target: &Target, call: &Call) {
    let Call::Command(name, arguments) = call else {
        assert!(
            matches!(request.method.as_str(), "GET" | "HEAD"),
            "{request:?}"
        );
        return;
    };
    if let [v1, qmp, command] = &target.segments[..]
        && (v1.as_str(), qmp.as_str()) == ("v1", "qmp")
    {
        assert_eq!((request.method.as_str(), name), ("POST", command));
        return;
    }
    let leads = ROUTES.iter().find(|route| {
        let is_method = match route.method {
            Method::Get => matches!(request.method.as_str(), "GET" | "HEAD"),
            other => other.name() == request.method,
        };
        let parts: Vec<&str> = route.path.split('/').skip(1).collect();
        let fits = |(part, segment): (&&str, &String)| part.starts_with('{') || *part == segment;
        is_method
            && parts.len() == target.segments.len()
            && parts.iter().zip(&target.segments).all(fits)
    });
    let route = leads.expect("a row");
    let Serves::Command(command, _) = route.serves else {
        panic!("{route:?} leads to no command");
    };
    assert_eq!(name, command);
    let parts = route.path.split('/').skip(1).zip(&target.segments);
    for (_, segment) in parts.filter(|(part, _)| part.starts_with('{')) {
        let is_it = |value: &serde_json::Value| value.as_str() == Some(segment);
        assert!(arguments.values().any(is_it), "{arguments:?}");
    }
}

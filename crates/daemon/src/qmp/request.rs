//! [`Request`]: what a client asks for.

use serde_json::{Map, Value};

use super::{Arguments, Failure};

/// A command with its arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The name of the command.
    pub command: String,
    /// What it is to be done with.
    pub arguments: Arguments,
    /// It overtakes others (`exec-oob`).
    pub out_of_band: bool,
}

impl Request {
    /// Whether a message asks to overtake others.
    pub fn is_out_of_band(message: &Value) -> bool {
        message.get("exec-oob").is_some() && message.get("execute").is_none()
    }

    /// Takes a message apart: the request, or why it is none, and the `id` that its answer
    /// must bear. Requests that overtake others are some only where `oob` is enabled.
    pub fn parse(message: Value, oob: bool) -> (Result<Request, Failure>, Option<Value>) {
        let Value::Object(mut members) = message else {
            return (Err(Failure::new("QMP input must be a JSON object")), None);
        };
        let id = members.remove("id");
        (Request::from_members(members, oob), id)
    }

    fn from_members(members: Map<String, Value>, oob: bool) -> Result<Request, Failure> {
        let mut command = None;
        let mut arguments = Map::new();
        for (key, value) in members {
            match (key.as_str(), value) {
                ("execute" | "exec-oob", value) if key == "execute" || oob => {
                    let Value::String(name) = value else {
                        let text = format!("QMP input member '{key}' must be a string");
                        return Err(Failure::new(text));
                    };
                    if let Some((_, other)) = command.replace((name, key.clone())) {
                        let text = format!("QMP input member '{key}' clashes with '{other}'");
                        return Err(Failure::new(text));
                    }
                }
                ("arguments", Value::Object(members)) => arguments = members,
                ("arguments", _) => {
                    let text = "QMP input member 'arguments' must be an object";
                    return Err(Failure::new(text));
                }
                (other, _) => {
                    let text = format!("QMP input member '{other}' is unexpected");
                    return Err(Failure::new(text));
                }
            }
        }
        match command {
            Some((command, key)) => Ok(Request {
                command,
                arguments: Arguments::new(arguments),
                out_of_band: key == "exec-oob",
            }),
            None => Err(Failure::new("QMP input lacks member 'execute'")),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_no_request_is_told_in_qemus_words() {
        for (message, text) in [
            (json!([1]), "QMP input must be a JSON object"),
            (json!({}), "QMP input lacks member 'execute'"),
            (
                json!({"execute": 1}),
                "QMP input member 'execute' must be a string",
            ),
            (
                json!({"execute": "quit", "arguments": 1}),
                "QMP input member 'arguments' must be an object",
            ),
            (
                json!({"execute": "quit", "arg": 1}),
                "QMP input member 'arg' is unexpected",
            ),
        ] {
            let (request, id) = Request::parse(message, false);
            assert_eq!(request.unwrap_err().text, text);
            assert_eq!(id, None);
        }
        let (request, id) = Request::parse(json!({"execute": "quit", "id": [7]}), false);
        assert_eq!(request.unwrap().command, "quit");
        assert_eq!(id, Some(json!([7])));
    }
}

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
}

impl Request {
    /// Takes a message apart: the request, or why it is none, and the `id` that its answer
    /// must bear.
    pub fn parse(message: Value) -> (Result<Request, Failure>, Option<Value>) {
        let Value::Object(mut members) = message else {
            return (Err(Failure::new("QMP input must be a JSON object")), None);
        };
        let id = members.remove("id");
        (Request::from_members(members), id)
    }

    fn from_members(members: Map<String, Value>) -> Result<Request, Failure> {
        let mut command = None;
        let mut arguments = Map::new();
        for (key, value) in members {
            match (key.as_str(), value) {
                ("execute", Value::String(name)) => command = Some(name),
                ("execute", _) => {
                    return Err(Failure::new("QMP input member 'execute' must be a string"));
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
            Some(command) => Ok(Request {
                command,
                arguments: Arguments::new(arguments),
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
            let (request, id) = Request::parse(message);
            assert_eq!(request.unwrap_err().text, text);
            assert_eq!(id, None);
        }
        let (request, id) = Request::parse(json!({"execute": "quit", "id": [7]}));
        assert_eq!(request.unwrap().command, "quit");
        assert_eq!(id, Some(json!([7])));
    }
}

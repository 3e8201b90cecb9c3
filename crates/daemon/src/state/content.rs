//! [`Content`]: what a state file says, as pieces of text. With a thousand disks a command changes one of
//! them; the other pieces are there already, and are compared and joined, not made anew.

use std::sync::Arc;

use serde_json::{Value, json};

/// What a state file says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) objects: String,
    pub(super) server: String,
    pub(super) nodes: String,
    pub(super) exports: Vec<ExportPiece>,
    pub(super) jobs: Vec<Value>,
    pub(super) config: Arc<str>,
    pub(super) chains: String,
    pub(super) chains_left: String,
    pub(super) led: String,
}

/// An export: how to make it, and the node that it shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExportPiece {
    pub(crate) options: Arc<str>,
    pub(crate) node: String,
}

/// Whether a job ends with the users of a node on another one; `behind` finds the image behind filters, to
/// which a commit goes that was begun by the name of one.
fn moves_users(job: &Value, node: &str, behind: &dyn Fn(&str) -> String) -> bool {
    let command = job["command"].as_str().unwrap_or_default();
    let device = job["arguments"]["device"].as_str().unwrap_or_default();
    let is_commit = command.ends_with("commit");
    match device == node {
        true => is_commit || command.ends_with("mirror"),
        false => is_commit && behind(device) == node,
    }
}

impl Content {
    /// Has exports of a node show another one; `behind` finds the image behind filters.
    pub(super) fn lead(&mut self, from: &str, to: &str, behind: &dyn Fn(&str) -> String) {
        for export in self.exports.iter_mut().filter(|one| one.node == from) {
            to.clone_into(&mut export.node);
        }
        // Begun anew it would have what is older written over what users go on with.
        self.jobs.retain(|job| !moves_users(job, from, behind));
    }

    /// All of it, as the file has it.
    pub(super) fn text(&self) -> String {
        let jobs = Value::Array(self.jobs.clone()).to_string();
        let of_exports = self.exports.iter();
        let of_exports = of_exports.map(|one| one.options.len() + one.node.len() + 32);
        let len_bytes = self.nodes.len() + self.config.len() + of_exports.sum::<usize>() + 4096;
        let mut text = String::with_capacity(len_bytes);
        let mut member = |begin: &str, value: &str| {
            text.push_str(begin);
            text.push_str(value);
        };
        member("{\"objects\":", &self.objects);
        member(",\"server\":", &self.server);
        member(",\"nodes\":", &self.nodes);
        member(",\"exports\":[", "");
        for (at, export) in self.exports.iter().enumerate() {
            let begin = ["{\"options\":", ",{\"options\":"][usize::from(at > 0)];
            member(begin, &export.options);
            member(",\"node\":", &json!(export.node).to_string());
            member("}", "");
        }
        member("],\"jobs\":", &jobs);
        member(",\"config\":", &self.config);
        member(",\"chains\":", &self.chains);
        member(",\"chains-left\":", &self.chains_left);
        member(",\"led\":", &self.led);
        member("}", "");
        text
    }

    /// It as a value, to be changed.
    pub(super) fn to_value(&self) -> Value {
        // It was written by this program.
        serde_json::from_str(&self.text()).unwrap_or_default()
    }

    pub(super) fn of_value(content: &Value) -> Content {
        let list = |key: &str| content[key].as_array().cloned().unwrap_or_default();
        let exports = list("exports").into_iter().map(|export| ExportPiece {
            options: export["options"].to_string().into(),
            node: export["node"].as_str().unwrap_or_default().to_owned(),
        });
        Content {
            objects: content["objects"].to_string(),
            server: content["server"].to_string(),
            nodes: content["nodes"].to_string(),
            exports: exports.collect(),
            jobs: list("jobs"),
            config: content["config"].to_string().into(),
            chains: content["chains"].to_string(),
            chains_left: content["chains-left"].to_string(),
            led: content["led"].to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_over_that_has_led_its_users() {
        let behind = |node: &str| node.trim_start_matches("limits-of-").to_owned();
        let left = |command: &str, device: &str| {
            let job = json!({"command": command, "arguments": {"job-id": "j", "device": device}});
            let mut content = Content::of_value(&json!({"jobs": [job]}));
            content.lead("a", "b", &behind);
            content.jobs.len()
        };
        assert_eq!(left("block-commit", "a"), 0);
        assert_eq!(left("block-commit", "limits-of-a"), 0);
        assert_eq!(left("block-commit", "limits-of-c"), 1);
        assert_eq!(left("blockdev-mirror", "a"), 0);
        // Its users are those of the limits.
        assert_eq!(left("blockdev-mirror", "limits-of-a"), 1);
        assert_eq!(left("block-stream", "a"), 1);
    }

    #[test]
    fn pieces_and_a_value_say_the_same() {
        let value = json!({
            "objects": [{"id": "a"}],
            "server": null,
            "nodes": [{"driver": "qcow2", "node-name": "a"}],
            "exports": [
                {"options": {"id": "e", "type": "nbd"}, "node": "a"},
                {"options": {"id": "f \"", "type": "nbd"}, "node": "b"},
            ],
            "jobs": [{"command": "block-stream", "arguments": {"job-id": "j"}}],
            "config": {"disk a": "a"},
            "chains": [],
            "chains-left": [],
            "led": {"a": "b"},
        });
        let content = Content::of_value(&value);
        assert_eq!(content.text(), value.to_string());
        assert_eq!(content.to_value(), value);
    }
}

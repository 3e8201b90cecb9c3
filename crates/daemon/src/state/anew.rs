//! Jobs of a daemon that is over, begun anew: how, and which are not.
//!
//! A job is begun by the command that began it. Where that would mean something else by now, since what
//! the first one has done is not done again or cannot be, it is another command, or none.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};
use vellum_graph::Nodes;

use super::saved::{SavedJob, SavedState};

/// The request that begins a job anew: what it made is there. Where no format was asked for, that is
/// `made` in the format of its source.
pub(super) fn begun_anew(command: &str, arguments: &Value, made: Option<&str>) -> Value {
    let mut arguments = arguments.clone();
    let is_existing = arguments["mode"] == "existing";
    if command == "drive-mirror" && is_existing {
        copy_all(&mut arguments);
    }
    if command.starts_with("drive-") {
        arguments["mode"] = json!("existing");
        let made = made.filter(|_| !is_existing && arguments.get("format").is_none());
        if let Some(format) = made {
            // What is in it may look like another one.
            arguments["format"] = json!(format);
        }
    }
    json!({"command": command, "arguments": arguments})
}

/// A mirror that was to copy what is written, and nothing of what was there, does not know any more what
/// that was. (Where the target stands on the source it shows the rest of it anyway.)
fn copy_all(arguments: &mut Value) {
    if arguments["sync"] == "none" {
        arguments["sync"] = json!("full");
    }
}

impl SavedJob {
    /// A job whose target was opened for it writes to that node, where the file has it: others used it too.
    pub(super) fn onto_known(self, nodes: &[Map<String, Value>]) -> SavedJob {
        let target = self.text("node-name").to_owned();
        let is_target = |node: &Map<String, Value>| {
            node.get("node-name").and_then(Value::as_str) == Some(&*target)
        };
        if self.command != "drive-mirror" || !nodes.iter().any(is_target) {
            return self;
        }
        let mut arguments = self.arguments;
        // How the file was made and opened.
        arguments.retain(|key, _| !["format", "mode", "node-name", "unmap"].contains(&&**key));
        arguments.insert("target".to_owned(), json!(target));
        SavedJob {
            command: "blockdev-mirror".to_owned(),
            arguments,
            ..self
        }
    }

    fn text(&self, key: &str) -> &str {
        let value = self.arguments.get(key).and_then(Value::as_str);
        value.unwrap_or_default()
    }

    fn is_backup(&self) -> bool {
        self.command.ends_with("-backup")
    }

    /// Whether its target was to show its source at the moment when it began, and copied is only what is
    /// overwritten.
    fn is_view(&self) -> bool {
        self.is_backup() && self.text("sync") == "none"
    }

    /// The arguments that begin it anew.
    ///
    /// # Errors
    /// If nothing does: why not.
    pub(super) fn anew(&self, nodes: &Nodes) -> Result<Map<String, Value>, String> {
        let refusals = [
            (
                self.is_view(),
                "what its target shows would be of two moments",
            ),
            (
                self.is_backup() && self.arguments.get("discard-source") == Some(&json!(true)),
                "what it has copied is not in its source any more, and would be overwritten in its target",
            ),
            (
                self.is_one_of_several,
                "it would be of another moment than the others of its transaction",
            ),
        ];
        if let Some((_, why)) = refusals.into_iter().find(|(is_so, _)| *is_so) {
            return Err(why.to_owned());
        }
        let mut arguments = Value::Object(self.arguments.clone());
        let source = BTreeSet::from([self.text("device").to_owned()]);
        let is_overlay = || nodes.stands_on_any(self.text("target"), &source);
        if self.command == "blockdev-mirror" && !is_overlay() {
            copy_all(&mut arguments);
        }
        Ok(super::described::members(arguments))
    }
}

impl SavedState {
    /// Nodes of which a job that is not begun anew would have to go on keeping what they show.
    pub(super) fn lost_views(&self) -> BTreeSet<String> {
        let views = self.jobs.iter().filter(|job| job.is_view());
        views.map(|job| job.text("target").to_owned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_begun_with_what_it_made() {
        let anew = |command: &str, mode: &str| {
            let arguments = json!({"job-id": "j", "sync": "none", "mode": mode});
            let begun = begun_anew(command, &arguments, Some("raw"));
            let arguments = &begun["arguments"];
            let is_made = mode != "existing";
            assert_eq!(arguments.get("format").is_some(), is_made);
            (arguments["sync"].clone(), arguments["mode"].clone())
        };
        let (none, full, existing) = (json!("none"), json!("full"), json!("existing"));
        let made = "absolute-paths";
        assert_eq!(anew("drive-mirror", made), (none.clone(), existing.clone()));
        assert_eq!(anew("drive-mirror", "existing"), (full, existing.clone()));
        assert_eq!(anew("drive-backup", "existing"), (none, existing));
    }

    #[test]
    fn a_mirror_goes_on_to_the_node_that_others_use() {
        let job = || SavedJob {
            id: "j".to_owned(),
            command: "drive-mirror".to_owned(),
            arguments: super::super::described::members(json!({
                "job-id": "j", "device": "a", "target": "t.img", "node-name": "t", "sync": "full",
                "mode": "existing", "format": "qcow2", "unmap": true, "speed": 5,
            })),
            is_paused: true,
            is_one_of_several: false,
        };
        let nodes = |name: &str| vec![super::super::described::members(json!({"node-name": name}))];
        let kept = job().onto_known(&nodes("a"));
        assert_eq!(
            (&*kept.command, &kept.arguments),
            ("drive-mirror", &job().arguments)
        );
        let led = job().onto_known(&nodes("t"));
        assert!(led.is_paused);
        assert_eq!(led.command, "blockdev-mirror");
        let wanted =
            json!({"job-id": "j", "device": "a", "target": "t", "sync": "full", "speed": 5});
        assert_eq!(Value::Object(led.arguments), wanted);
    }

    #[test]
    fn a_job_that_would_be_another_one_is_not_begun() {
        let begin = |command: &str, arguments: Value, is_one_of_several: bool| {
            let job = SavedJob {
                id: "j".to_owned(),
                command: command.to_owned(),
                arguments: super::super::described::members(arguments),
                is_paused: false,
                is_one_of_several,
            };
            job.anew(&Nodes::default())
        };
        let backup = |more: Value| {
            let mut arguments =
                json!({"job-id": "j", "device": "a", "target": "b", "sync": "full"});
            for (key, value) in super::super::described::members(more) {
                arguments[key] = value;
            }
            begin("blockdev-backup", arguments, false)
        };
        assert!(backup(json!({})).is_ok());
        assert!(backup(json!({"discard-source": false})).is_ok());
        assert!(backup(json!({"discard-source": true})).is_err());
        assert!(backup(json!({"sync": "none"})).is_err());
        let mirror = json!({"job-id": "j", "device": "a", "target": "b", "sync": "none"});
        let begun = begin("blockdev-mirror", mirror.clone(), false);
        assert_eq!(begun.expect("it is begun")["sync"], "full");
        assert!(begin("blockdev-mirror", mirror, true).is_err());
    }
}

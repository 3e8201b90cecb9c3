//! `--object help`, `--chardev help` and the like.

use vellum_daemon::{backend_names, object_help};

use super::arguments::{Arguments, Part};
use crate::server::Failure;
use crate::trace;

/// The text that the first of such options asks for.
///
/// # Errors
/// In QEMU's words for options that have no help.
pub(super) fn asked(arguments: &Arguments) -> Result<Option<String>, Failure> {
    for item in &arguments.items {
        let words: Vec<&str> = item.text.split(',').collect();
        let is_help = |word: &&str| *word == "help" || *word == "?";
        if !words.last().is_some_and(is_help) {
            continue;
        }
        let text = match (item.part, &words[..]) {
            (Part::Object, [_]) => object_help(None),
            (Part::Object, [kind, _]) => object_help(Some(kind)),
            (Part::Chardev, [_]) => {
                let names: Vec<String> = backend_names()
                    .iter()
                    .map(|name| format!("\n  {name}"))
                    .collect();
                Some(format!(
                    "Available chardev backend types: {}\n",
                    names.concat()
                ))
            }
            (Part::Trace, [_]) => Some(trace::list()),
            (
                Part::Blockdev | Part::Export | Part::Metrics | Part::Monitor | Part::NbdServer,
                [_],
            ) => {
                let text = "Help is not available for this option";
                return Err(Failure::message(text).with_prefix(item));
            }
            _ => None,
        };
        if text.is_some() {
            return Ok(text);
        }
    }
    Ok(None)
}

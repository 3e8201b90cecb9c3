//! `ctl backup --wait`: waits for a job, shows how far it is, and tells what became of it.

use std::time::Duration;

use serde_json::{Value, json};

use super::action::escaped;
use super::client::Client;
use super::tables::{items, number, text};
use crate::progress::Progress;

/// How often the daemon is asked.
const PAUSE: Duration = Duration::from_millis(200);

/// Waits for a job that is kept until somebody has heard of its end, and has it go then.
///
/// # Errors
/// What the job has met, or why nobody knows.
pub fn until_ended(client: &Client, id: &str, mut progress: Progress) -> Result<(), String> {
    let job = loop {
        let jobs = client.ask_json("GET", "/v1/jobs", None)?;
        let Some(job) = items(&jobs).find(|job| text(job, "id") == id).cloned() else {
            progress.clear();
            return Err(format!(
                "The job '{id}' is gone, and nobody knows how it has ended: somebody has dismissed it, or the \
                 daemon was started again"
            ));
        };
        if text(&job, "status") == "concluded" {
            break job;
        }
        progress.show(
            number(&job, "current-progress"),
            number(&job, "total-progress"),
        );
        std::thread::sleep(PAUSE);
    };
    progress.end();
    let path = format!("/v1/jobs/{}/dismiss", escaped(id));
    // It is known how it has ended, whoever else has it go.
    let _ = client.ask_json("POST", &path, Some(&json!({})));
    match job.get("error").and_then(Value::as_str) {
        None => Ok(()),
        Some(why) => Err(format!("The job '{id}' has failed: {why}")),
    }
}

//! The monitor of a tortured daemon: what became of its jobs, and how often it has met a full file system.

use std::process::Child;
use std::time::Duration;

use serde_json::Value;
use vellum_testing::qmp::{Error, Qmp};

/// Why there is no answer: the daemon is dead, or it lives and says nothing.
pub type Silence = Error;

/// What became of a command: what it returned, or why it was refused.
pub type Outcome = std::result::Result<Value, String>;

/// The monitor of a daemon, on its standard input and output.
#[derive(Debug)]
pub struct Monitor {
    qmp: Qmp,
    /// Reports of a full file system in events that are dropped.
    full_before: u64,
}

impl Monitor {
    /// Takes the pipes of a daemon that was just started.
    pub fn take(child: &mut Child) -> Self {
        Monitor {
            qmp: Qmp::of_child(child),
            full_before: 0,
        }
    }

    /// Waits for the greeting and answers it.
    pub fn greet(&mut self) -> std::result::Result<(), Silence> {
        self.qmp.try_greet()
    }

    /// How often it has reported that requests have met a full file system.
    pub fn full(&self) -> u64 {
        let events = self.qmp.events.iter();
        let full = events.filter(|event| event["data"]["nospace"] == true);
        self.full_before + full.count() as u64
    }

    /// Takes in what a daemon that is dead has said before.
    pub fn drain(&mut self) {
        // Nothing is wanted, so this waits for the end.
        let _ = self.qmp.try_wait(vellum_testing::PATIENCE, |_| None::<()>);
    }

    /// Has the daemon carry a command out.
    pub fn ask(&mut self, name: &str, arguments: Value) -> std::result::Result<Outcome, Silence> {
        match self.qmp.try_must(name, arguments) {
            Ok(returned) => Ok(Ok(returned)),
            Err(Error::Refused(why)) => Ok(Err(why)),
            Err(silence) => Err(silence),
        }
    }

    /// Waits until a job is ready to complete (`true`) or has ended (`false`).
    pub fn wait_ready(
        &mut self,
        job: &str,
        limit: Duration,
    ) -> std::result::Result<Option<bool>, Silence> {
        self.qmp.try_wait(limit, |event| {
            if event["data"]["id"] != job {
                return None;
            }
            match event["data"]["status"].as_str()? {
                "ready" => Some(true),
                "aborting" | "concluded" | "null" => Some(false),
                _ => None,
            }
        })
    }

    /// Waits for the end of a job: whether it did what it was to do, and what was wrong.
    pub fn wait_end(
        &mut self,
        job: &str,
        limit: Duration,
    ) -> std::result::Result<Option<std::result::Result<(), String>>, Silence> {
        let end = self.qmp.try_wait(limit, |event| {
            if event["data"]["device"] != job {
                return None;
            }
            match (event["event"].as_str()?, event["data"]["error"].as_str()) {
                ("BLOCK_JOB_COMPLETED", None) => Some(Ok(())),
                ("BLOCK_JOB_COMPLETED", Some(error)) => Some(Err(error.to_owned())),
                ("BLOCK_JOB_CANCELLED", _) => Some(Err("cancelled".to_owned())),
                _ => None,
            }
        })?;
        if end.is_some() {
            // Only then its nodes are free.
            self.qmp.try_wait(limit, |event| {
                let data = &event["data"];
                (data["id"] == job && data["status"] == "null").then_some(())
            })?;
            self.full_before = self.full();
            self.qmp.events.clear();
        }
        Ok(end)
    }
}

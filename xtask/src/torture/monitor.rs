//! A QMP client: sends commands, returns their answers, and keeps the events in between.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// A daemon that answers no command for so long hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Why there is no answer.
#[derive(Debug)]
pub enum Silence {
    /// The daemon is dead.
    Gone,
    /// It lives, and says nothing.
    Hangs(String),
}

/// What became of a command: what it returned, or why it was refused.
pub type Outcome = std::result::Result<Value, String>;

/// The monitor of a daemon, on its standard input and output.
#[derive(Debug)]
pub struct Monitor {
    input: ChildStdin,
    lines: Receiver<String>,
    events: Vec<Value>,
    /// How often it was told that requests have met a full file system.
    pub full: u64,
}

impl Monitor {
    /// Takes the pipes of a daemon that was just started.
    pub fn take(child: &mut Child) -> Result<Self> {
        let input = child.stdin.take().context("no standard input")?;
        let output = child.stdout.take().context("no standard output")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let mut output = BufReader::new(output);
            let mut line = String::new();
            // A kill may cut the last one off.
            while output.read_line(&mut line).is_ok() && line.ends_with('\n') {
                if sender.send(std::mem::take(&mut line)).is_err() {
                    return;
                }
            }
        });
        Ok(Monitor {
            input,
            lines,
            events: Vec::new(),
            full: 0,
        })
    }

    /// Waits for the greeting and answers it.
    pub fn greet(&mut self) -> std::result::Result<(), Silence> {
        self.next(Instant::now() + PATIENCE)?;
        self.ask("qmp_capabilities", json!({})).map(drop)
    }

    fn next(&mut self, deadline: Instant) -> std::result::Result<Option<Value>, Silence> {
        let left = deadline.saturating_duration_since(Instant::now());
        match self.lines.recv_timeout(left) {
            Ok(line) => {
                let told = serde_json::from_str::<Value>(&line);
                let told =
                    told.map_err(|error| Silence::Hangs(format!("{line:?} is no JSON: {error}")))?;
                self.full += u64::from(told["data"]["nospace"] == true);
                Ok(Some(told))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(Silence::Gone),
        }
    }

    /// Takes in what a daemon that is dead has said before.
    pub fn drain(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while let Ok(Some(message)) = self.next(deadline) {
            self.events.push(message);
        }
    }

    /// Has the daemon carry a command out.
    pub fn ask(&mut self, name: &str, arguments: Value) -> std::result::Result<Outcome, Silence> {
        let request = json!({"execute": name, "arguments": arguments});
        let sent = writeln!(self.input, "{request}").and_then(|()| self.input.flush());
        if sent.is_err() {
            return Err(Silence::Gone);
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            let Some(mut message) = self.next(deadline)? else {
                return Err(Silence::Hangs(format!("no answer to {request}")));
            };
            if message.get("event").is_some() {
                self.events.push(message);
            } else if message.get("error").is_some() {
                return Ok(Err(message["error"]["desc"].to_string()));
            } else {
                return Ok(Ok(message["return"].take()));
            }
        }
    }

    /// Waits until an event has come that is wanted, or the limit is over.
    fn wait<T>(
        &mut self,
        limit: Duration,
        wanted: impl Fn(&Value) -> Option<T>,
    ) -> std::result::Result<Option<T>, Silence> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(found) = self.events.iter().find_map(&wanted) {
                return Ok(Some(found));
            }
            match self.next(deadline)? {
                Some(message) => self.events.push(message),
                None => return Ok(None),
            }
        }
    }

    /// Waits until a job is ready to complete (`true`) or has ended (`false`).
    pub fn wait_ready(
        &mut self,
        job: &str,
        limit: Duration,
    ) -> std::result::Result<Option<bool>, Silence> {
        self.wait(limit, |event| {
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
        let end = self.wait(limit, |event| {
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
            self.wait(limit, |event| {
                let data = &event["data"];
                (data["id"] == job && data["status"] == "null").then_some(())
            })?;
            self.events.clear();
        }
        Ok(end)
    }
}

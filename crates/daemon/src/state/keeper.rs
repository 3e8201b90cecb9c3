//! [`Keeper`]: writes the state file, whoever asks for it.
//!
//! Invariants:
//! - While users are held up, the file says where they are, or will be: if it cannot say that they are
//!   elsewhere by now, it says again where they were.
//! - What the file has is known, or it is written again by whoever asks next.

use std::fmt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use parking_lot::Mutex;
use vellum::{Error, ErrorKind};
use vellum_graph::Nodes;
use vellum_graph::live::DescriptionMemo;
use vellum_io::error::io_text;

use super::content::Content;
use super::file::{self, WriteFailure};
use super::lost::Lost;

/// Puts a text in the place of a file's; another one than [`file::write`] only in tests.
type Write = Box<dyn Fn(&Path, &str) -> Result<(), WriteFailure> + Send + Sync>;

/// What the file has.
#[derive(Debug, Clone, Default)]
struct InFile {
    content: Arc<Content>,
    /// A write of it has failed too late to tell.
    is_doubtful: bool,
}

/// Writes the file; it may be asked from any lane.
pub(super) struct Keeper {
    path: PathBuf,
    write: Write,
    in_file: Mutex<InFile>,
    /// How often it was to be written.
    asked: Mutex<u64>,
    /// Which of these is in the file, durably; held while one is written.
    done: Mutex<u64>,
    memo: Mutex<DescriptionMemo>,
    lost: Arc<Mutex<Lost>>,
}

impl Keeper {
    /// Keeps the file at a path, of which nothing is known yet.
    pub(super) fn new(path: &Path, lost: Arc<Mutex<Lost>>) -> Keeper {
        Keeper {
            path: path.to_owned(),
            write: Box::new(file::write),
            in_file: Mutex::default(),
            asked: Mutex::default(),
            done: Mutex::default(),
            memo: Mutex::default(),
            lost,
        }
    }

    /// Has the file say what there is, also where nobody waits for that any more.
    pub(super) async fn write(self: &Arc<Self>, content: Content) -> vellum::Result<()> {
        let number = {
            let mut asked = self.asked.lock();
            let is_still = self.done.try_lock().is_some_and(|done| *done == *asked);
            if is_still && self.in_file.lock().is_known_to_be(&content) {
                return Ok(());
            }
            *asked += 1;
            *asked
        };
        let (keeper, content) = (self.clone(), Arc::new(content));
        let (sender, receiver) = futures_channel::oneshot::channel();
        // A disk takes its time, and jobs and timers have none.
        let thread = std::thread::Builder::new().name("state".to_owned());
        let started = thread.spawn(move || {
            // Who asked may have been given up meanwhile.
            let _ = sender.send(keeper.write_in_turn(number, content));
        });
        started.map_err(|error| {
            let error = Error::no_thread(&error);
            error.context(
                "write the state",
                format!("cannot write the state file '{}'", self.path.display()),
            )
        })?;
        let why = match receiver.await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(failure)) => io_text(failure.error()),
            Err(_) => "the thread that writes it has ended".to_owned(),
        };
        let text = format!(
            "cannot write the state file '{}': {why}",
            self.path.display()
        );
        Err(Error::new(ErrorKind::Io, "write the state", text))
    }

    /// Writes what was the `number`th to be written, unless a later one is there, durably.
    fn write_in_turn(&self, number: u64, content: Arc<Content>) -> Result<(), WriteFailure> {
        let mut done = self.done.lock();
        if number < *done {
            return Ok(());
        }
        let written = (self.write)(&self.path, &content.text());
        if written.is_ok() {
            *done = number;
        }
        self.in_file.lock().note(content, &written);
        written
    }

    /// Has the file say what users find who are held up: that those of a node use another one, or that
    /// nodes have changed. If that fails, it says what it did before, as far as it can be written at all.
    pub(super) fn before_going_on(
        self: Arc<Self>,
        nodes: &Nodes,
        led: Option<(&str, &str)>,
    ) -> Pin<Box<dyn Future<Output = vellum::Result<()>> + Send>> {
        let before = self.in_file.lock().content.clone();
        let mut content = Content::clone(&before);
        if let Some((from, to)) = led {
            if nodes.is_made_up(to) {
                let error = Error::new(ErrorKind::Unsupported, "write the state", nameless(to));
                return Box::pin(async move { Err(error) });
            }
            content.lead(from, to, &|node| nodes.skip_filters(node));
            content.led = nodes.leads_with(from, to).describe().to_string();
        }
        content.nodes = self.described(nodes, led);
        Box::pin(async move {
            let written = self.write(content).await;
            if written.is_err() {
                // Users stay where they are, and may write before anybody else has it written.
                let _ = self.write(Content::clone(&before)).await;
            }
            written
        })
    }

    /// Has the file say that a job is over, and else what it does.
    pub(super) async fn forget_job(self: &Arc<Self>, id: &str) -> vellum::Result<()> {
        let mut content = Content::clone(&self.in_file.lock().content);
        content.jobs.retain(|job| job["arguments"]["job-id"] != id);
        self.write(content).await
    }

    /// How to make the nodes, and those that are lost.
    pub(super) fn described(&self, nodes: &Nodes, led: Option<(&str, &str)>) -> String {
        let text = nodes.descriptions_text(led, &mut self.memo.lock());
        let lost = self.lost.lock();
        if lost.is_empty() {
            return text;
        }
        let mut described = serde_json::from_str(&text).unwrap_or_default();
        lost.add_nodes(&mut described, nodes);
        described.to_string()
    }
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keeper({})", self.path.display())
    }
}

impl InFile {
    fn is_known_to_be(&self, content: &Content) -> bool {
        !self.is_doubtful && *self.content == *content
    }

    /// Notes what has become of a write.
    fn note(&mut self, content: Arc<Content>, written: &Result<(), WriteFailure>) {
        match written {
            Ok(()) => {
                *self = InFile {
                    content,
                    is_doubtful: false,
                }
            }
            // It is found there, unless the power is cut.
            Err(WriteFailure::Replaced(_)) => {
                *self = InFile {
                    content,
                    is_doubtful: true,
                }
            }
            Err(WriteFailure::AsBefore(_)) => {}
        }
    }
}

/// Why users are not led to a node.
pub(super) fn nameless(node: &str) -> String {
    format!(
        "'{node}' has no name of its own, by which the state file could say that users are there: give it one \
         (a 'node-name', or 'backing' = another disk of the file)"
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use vellum_io::lane::block_on;

    use super::*;

    /// Keeps a file of which so many writes succeed, and then one fails as it is told.
    fn keeper(path: &Path, good: usize, fails: fn(std::io::Error) -> WriteFailure) -> Arc<Keeper> {
        let mut keeper = Keeper::new(path, Arc::default());
        let count = Mutex::new(0);
        keeper.write = Box::new(move |path, text| {
            *count.lock() += 1;
            let is_bad = *count.lock() == good + 1;
            let error = || fails(std::io::Error::other("as the test wants it"));
            match (is_bad, error()) {
                (true, failure @ WriteFailure::AsBefore(_)) => Err(failure),
                (true, failure) => file::write(path, text).and(Err(failure)),
                _ => file::write(path, text),
            }
        });
        Arc::new(keeper)
    }

    /// What a file says of an export that shows a node, and of a job.
    fn content(node: &str) -> Content {
        Content::of_value(&json!({
            "objects": [], "server": null, "nodes": [], "config": {}, "chains": [], "chains-left": [],
            "led": {}, "exports": [{"options": {"id": "e"}, "node": node}],
            "jobs": [{"command": "block-stream", "arguments": {"job-id": "j", "device": "x"}}],
        }))
    }

    fn shown(path: &Path) -> serde_json::Value {
        let content = file::read(path).expect("as it was written");
        content.expect("it is there")["exports"][0]["node"].clone()
    }

    #[test]
    fn what_users_were_not_led_to_is_not_in_the_file_when_they_go_on() {
        for fails in [WriteFailure::AsBefore, WriteFailure::Replaced] {
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("state");
            let keeper = keeper(&path, 1, fails);
            block_on(async {
                keeper.write(content("a")).await.expect("room");
                let nodes = Nodes::live();
                let led = keeper.clone().before_going_on(&nodes, Some(("a", "o")));
                assert!(led.await.is_err());
                assert_eq!(shown(&path), "a");
                let led = keeper.clone().before_going_on(&nodes, Some(("a", "o")));
                led.await.expect("room");
                assert_eq!(shown(&path), "o");
            });
        }
    }

    #[test]
    fn what_may_be_in_the_file_is_written_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state");
        let keeper = keeper(&path, 1, WriteFailure::Replaced);
        block_on(async {
            keeper.write(content("a")).await.expect("room");
            assert!(keeper.write(content("o")).await.is_err());
            assert_eq!(shown(&path), "o");
            keeper.write(content("a")).await.expect("room");
            assert_eq!(shown(&path), "a");
            // The same again is no write.
            std::fs::remove_file(&path).expect("it is there");
            keeper.write(content("a")).await.expect("nothing to write");
            assert!(!path.exists());
        });
    }

    #[test]
    fn what_fails_is_not_there_in_the_place_of_what_was_asked_for_before() {
        for fails in [WriteFailure::AsBefore, WriteFailure::Replaced] {
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("state");
            let keeper = keeper(&path, 0, fails);
            // The later one has its turn first.
            let later = keeper.write_in_turn(2, Arc::new(content("o")));
            assert!(later.is_err());
            let before = keeper.write_in_turn(1, Arc::new(content("a")));
            before.expect("room");
            assert_eq!(shown(&path), "a");
            let later = keeper.write_in_turn(3, Arc::new(content("b")));
            later.expect("room");
            let before = keeper.write_in_turn(2, Arc::new(content("o")));
            before.expect("what is there says it, too");
            assert_eq!(shown(&path), "b");
        }
    }

    #[test]
    fn a_job_that_is_over_is_not_in_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state");
        let keeper = Arc::new(Keeper::new(&path, Arc::default()));
        block_on(async {
            keeper.write(content("a")).await.expect("room");
            keeper.forget_job("j").await.expect("room");
        });
        let content = file::read(&path).expect("whole").expect("it is there");
        assert_eq!(content["jobs"], json!([]));
        assert_eq!(shown(&path), "a");
    }
}

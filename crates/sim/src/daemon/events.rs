//! The events of the daemon, kept for whoever waits for one.

use std::cell::RefCell;

use event_listener::Event;
use serde_json::Value;
use vellum_daemon::Listener;

/// What the daemon has told.
#[derive(Default)]
pub(super) struct DaemonEvents {
    events: RefCell<Vec<Value>>,
    changed: Event,
}

impl Listener for DaemonEvents {
    fn hear(&self, event: &Value) {
        self.events.borrow_mut().push(event.clone());
        self.changed.notify(usize::MAX);
    }
}

impl DaemonEvents {
    /// Waits for one of some events about a job; gives it.
    pub(super) async fn wait(&self, names: &[&str], job: &str) -> Value {
        loop {
            let changed = self.changed.listen();
            let found = self.events.borrow().iter().find_map(|event| {
                let name = event["event"].as_str().unwrap_or_default();
                let about = event["data"]["device"].as_str() == Some(job);
                (about && names.contains(&name)).then(|| event.clone())
            });
            if let Some(found) = found {
                return found;
            }
            changed.await;
        }
    }
}

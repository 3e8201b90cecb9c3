//! What happens, for those who want to hear of it.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::time::SystemTime;

use serde_json::Value;
use tracing::trace;

use crate::qmp;

use super::schema;

/// Whoever hears of events, such as a client of a monitor; servers implement it.
pub trait Listener {
    /// An event, as QMP puts it.
    fn hear(&self, event: &Value);
}

/// Emits events to listeners. Clones emit to the same ones.
#[derive(Clone, Default)]
pub struct Events(Rc<Shared>);

#[derive(Default)]
struct Shared {
    listeners: RefCell<Vec<Rc<dyn Listener>>>,
    /// What the first one is told, whenever it comes.
    for_first: RefCell<Vec<Value>>,
}

impl Events {
    /// One more listener.
    pub fn join(&self, listener: Rc<dyn Listener>) {
        for event in self.0.for_first.take() {
            listener.hear(&event);
        }
        self.0.listeners.borrow_mut().push(listener);
    }

    /// One listener less.
    pub fn leave<L: Listener>(&self, listener: &Rc<L>) {
        let same = |other: &Rc<dyn Listener>| Rc::as_ptr(other).cast() == Rc::as_ptr(listener);
        self.0.listeners.borrow_mut().retain(|other| !same(other));
    }

    /// Emits an event to all.
    pub(super) fn emit(&self, name: &str, data: Value) {
        self.emit_of(name, data, SystemTime::now());
    }

    /// Emits an event of a time when nobody could hear it yet.
    pub(super) fn emit_for_first(&self, name: &str, data: Value) {
        if !self.0.listeners.borrow().is_empty() {
            return self.emit(name, data);
        }
        trace!(name: "qmp_event", event = name, data = %data);
        let event = qmp::event(name, data, SystemTime::now());
        self.0.for_first.borrow_mut().push(event);
    }

    /// Emits an event that happened at a time.
    pub(super) fn emit_of(&self, name: &str, data: Value, time: SystemTime) {
        debug_assert!(schema::has_event(name), "{name} is missing in events.txt");
        trace!(name: "qmp_event", event = name, data = %data);
        let event = qmp::event(name, data, time);
        for listener in self.0.listeners.borrow().iter() {
            listener.hear(&event);
        }
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Events({} listeners)", self.0.listeners.borrow().len())
    }
}

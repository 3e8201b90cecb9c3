//! [`Debugger`]: the rules of a [`super::DebugStorage`], and the requests that they hold.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::rules::{Action, InjectedError, RequestKind, Rule, Rules};
use crate::Storage;
use crate::event::{Event, EventListener, Suspension};

/// What holds a request at a breakpoint.
#[derive(Debug, Default)]
struct Breakpoint {
    open: Mutex<bool>,
    opened: event_listener::Event,
}

impl Breakpoint {
    fn open(&self) {
        *self.open.lock() = true;
        self.opened.notify(usize::MAX);
    }

    fn is_open(&self) -> bool {
        *self.open.lock()
    }
}

/// Waits until every breakpoint has let go.
async fn resumed(gates: Vec<Arc<Breakpoint>>) {
    for gate in gates {
        loop {
            let opened = gate.opened.listen();
            if gate.is_open() {
                break;
            }
            opened.await;
        }
    }
}

#[derive(Debug)]
struct State {
    rules: Rules,
    /// Held requests by tag; the last one comes first.
    held: Vec<(Arc<str>, Arc<Breakpoint>)>,
}

/// The rules of a [`super::DebugStorage`], and the requests that they hold.
#[derive(Debug)]
pub struct Debugger {
    state: Mutex<State>,
    suspended: event_listener::Event,
    /// Hears of requests that are held and let go.
    tell: fn(&str),
}

impl Debugger {
    /// A debugger with its first rules; `tell` hears what happens to held requests.
    /// Rules of [`Event::None`] are played at once.
    pub fn new(rules: Vec<Rule>, tell: fn(&str)) -> Arc<Debugger> {
        let debugger = Arc::new(Debugger {
            state: Mutex::new(State {
                rules: Rules::new(rules),
                held: Vec::new(),
            }),
            suspended: event_listener::Event::new(),
            tell,
        });
        // Nobody is there yet who could be held.
        drop(debugger.event(Event::None));
        debugger
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Plays an event and waits as long as a breakpoint holds it.
    pub async fn emit(&self, event: Event) {
        (self as &dyn EventListener).emit(event).await;
    }

    /// Sets a breakpoint: the next request that comes to `event` is held under `tag`.
    pub fn set_breakpoint(&self, event: Event, tag: &str) {
        self.lock().rules.add(Rule {
            event,
            state: 0,
            action: Action::Suspend(tag.into()),
        });
    }

    /// Takes the breakpoints of a tag away and lets go what they hold; says whether
    /// there was anything.
    pub fn remove_breakpoints(&self, tag: &str) -> bool {
        let mut found = self.lock().rules.remove_breakpoints(tag);
        while self.resume(tag) {
            found = true;
        }
        found
    }

    /// Lets the request go that was held last under a tag; says whether there was one.
    pub fn resume(&self, tag: &str) -> bool {
        let mut state = self.lock();
        let Some(at) = state.held.iter().position(|(held, _)| **held == *tag) else {
            return false;
        };
        let (_, gate) = state.held.remove(at);
        drop(state);
        (self.tell)(&format!("blkdebug: Resuming request '{tag}'"));
        gate.open();
        true
    }

    /// Whether a request is held under a tag.
    pub fn is_suspended(&self, tag: &str) -> bool {
        self.lock().held.iter().any(|(held, _)| **held == *tag)
    }

    /// Waits until a request is held under a tag.
    pub async fn wait_suspended(&self, tag: &str) {
        loop {
            let suspended = self.suspended.listen();
            if self.is_suspended(tag) {
                return;
            }
            suspended.await;
        }
    }

    pub(super) fn strike(&self, kind: RequestKind, range: &Range<u64>) -> Option<InjectedError> {
        let len_bytes = range.end - range.start;
        self.lock()
            .rules
            .matching_error(kind, range.start, len_bytes)
    }
}

impl EventListener for Debugger {
    /// Plays the event's rules.
    fn event(&self, event: Event) -> Option<Suspension> {
        let mut state = self.lock();
        let tags = state.rules.play(event);
        if tags.is_empty() {
            return None;
        }
        let mut gates = Vec::new();
        for tag in &tags {
            let gate = Arc::<Breakpoint>::default();
            gates.push(gate.clone());
            state.held.insert(0, (tag.clone(), gate));
        }
        drop(state);
        for tag in &tags {
            (self.tell)(&format!("blkdebug: Suspended request '{tag}'"));
        }
        self.suspended.notify(usize::MAX);
        Some(Suspension::until(resumed(gates)))
    }
}

/// Storages that may have a [`Debugger`].
pub trait HasDebugger: Storage {
    /// The debugger that is told of events in the use of this storage
    /// ([`Storage::event_listener`]), where it is one that listens.
    fn debugger(&self) -> Option<Arc<Debugger>>;
}

impl<T: Storage + ?Sized> HasDebugger for T {
    fn debugger(&self) -> Option<Arc<Debugger>> {
        let listener: Arc<dyn Any + Send + Sync> = self.event_listener()?;
        listener.downcast().ok()
    }
}

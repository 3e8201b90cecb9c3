//! [`Shortcut`]: something that was found behind links, and that leads requests past them.
//!
//! Whoever looks through links (the mapping of a long chain, `qcow2/read/chain.rs`) becomes a
//! second user of each. The requests of a shortcut are counted in one place, whatever number of
//! links they pass.
//!
//! Invariants:
//! - While a link is drained no request runs that has passed it, and none begins: the drain
//!   ends each shortcut past the link before it waits for its requests. None is made past a
//!   link that is drained.
//! - What ended a shortcut ended it for good, and gave away what it had; another one is made when the
//!   links are free again.
//! - A request that has passed a link never waits for that link or one above it. The link
//!   that a shortcut ends at hears of it, to end it, and does not wait: a request goes on through that
//!   link as any other, and may be held up there.

use std::fmt::Debug;
use std::ops::Deref;
use std::sync::{Arc, Weak};

use vellum_io::sync::{Event, Mutex};

use super::Link;
use crate::BlockDevice;

/// What has been found behind links, for requests that pass these.
#[derive(Debug)]
pub(crate) struct Shortcut<T> {
    state: Mutex<State<T>>,
    /// The last request has ended after the shortcut had.
    idle: Event,
}

#[derive(Debug)]
struct State<T> {
    found: Found<T>,
    /// Requests that have begun and not ended.
    running: usize,
}

#[derive(Debug)]
enum Found<T> {
    /// Links are still being looked through.
    NotYet,
    /// Nothing that requests would gain by.
    Nothing,
    Something(Arc<T>),
    /// A link that was looked through is, or was, drained.
    Ended,
}

/// What a request meets.
#[derive(Debug)]
pub(crate) enum Entered<T> {
    /// It is counted.
    Passage(Passage<T>),
    /// It has to go through the links.
    Nothing,
    /// It has to find out anew.
    Ended,
}

/// A request that passes links, counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Passage<T> {
    /// `None` only while it is dropped.
    found: Option<Arc<T>>,
    shortcut: Arc<Shortcut<T>>,
}

/// What a shortcut does with a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stretch {
    /// Its requests go past the link.
    Past,
    /// It ends there: its requests go through the link.
    UpTo,
}

/// A shortcut as links see it.
pub(super) trait PastLinks: Debug + Send + Sync {
    /// Has no further request pass.
    fn end(&self);
    /// Whether no request will ever pass again, and none is under way.
    fn is_over(&self) -> bool;
    /// Notified when that may have become so.
    fn idle(&self) -> &Event;
}

impl<T: Debug + Send + Sync + 'static> Shortcut<T> {
    /// One that nobody can use before it is opened.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Shortcut {
            state: Mutex::new(State {
                found: Found::NotYet,
                running: 0,
            }),
            idle: Event::new(),
        })
    }

    /// Lets requests in, once all links know of the shortcut. `false` if one was drained meanwhile.
    pub(crate) fn open(&self, found: Option<T>) -> bool {
        let mut state = self.state.lock();
        let is_open = matches!(state.found, Found::NotYet);
        if is_open {
            state.found = found.map_or(Found::Nothing, |found| Found::Something(Arc::new(found)));
        }
        is_open
    }

    /// Counts a request, if there is a way for it.
    pub(crate) fn enter(self: &Arc<Self>) -> Entered<T> {
        let mut state = self.state.lock();
        let found = match &state.found {
            Found::Something(found) => found.clone(),
            Found::Nothing => return Entered::Nothing,
            Found::NotYet | Found::Ended => return Entered::Ended,
        };
        state.running += 1;
        Entered::Passage(Passage {
            found: Some(found),
            shortcut: self.clone(),
        })
    }

    /// Tells a link of the shortcut. `false` if it is drained, or leads to another device now.
    pub(crate) fn take(
        self: &Arc<Self>,
        link: &Link,
        target: &Arc<dyn BlockDevice>,
        stretch: Stretch,
    ) -> bool {
        let shortcut: Weak<dyn PastLinks> = Arc::<Self>::downgrade(self);
        link.lead_past(target, shortcut, stretch)
    }
}

impl<T: Debug + Send + Sync> PastLinks for Shortcut<T> {
    fn end(&self) {
        let found = std::mem::replace(&mut self.state.lock().found, Found::Ended);
        // Outside the lock: it may be the last to know of images.
        drop(found);
    }

    fn is_over(&self) -> bool {
        let state = self.state.lock();
        matches!(state.found, Found::Ended) && state.running == 0
    }

    fn idle(&self) -> &Event {
        &self.idle
    }
}

impl<T> Deref for Passage<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.found.as_ref().expect("it is there until the end")
    }
}

impl<T> Drop for Passage<T> {
    fn drop(&mut self) {
        // First: after a drain nobody knows of what stood behind the link.
        self.found = None;
        let mut state = self.shortcut.state.lock();
        state.running -= 1;
        let tell = state.running == 0 && matches!(state.found, Found::Ended);
        drop(state);
        if tell {
            self.shortcut.idle.notify(usize::MAX);
        }
    }
}

/// Waits until no request passes that has begun before the shortcut ended.
pub(super) async fn over(shortcut: &dyn PastLinks) {
    while !shortcut.is_over() {
        let idle = shortcut.idle().listen();
        if !shortcut.is_over() {
            idle.await;
        }
    }
}

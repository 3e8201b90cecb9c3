//! [`BeforeLeading`]: who wants to know before the users of a node go on with another one.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use vellum::Result;

use super::Nodes;

type Note = Pin<Box<dyn Future<Output = Result<()>> + Send>>;
type Notes = dyn Fn(&Nodes, &str, &str) -> Note + Send + Sync;

/// Notes it, while users are held up; if that fails they stay.
#[derive(Clone, Default)]
pub(super) struct BeforeLeading(Arc<OnceLock<Box<Notes>>>);

impl BeforeLeading {
    /// What is to be waited for, if anybody wants to know.
    pub(super) fn note(&self, nodes: &Nodes, from: &str, to: &str) -> Option<Note> {
        self.0.get().map(|notes| notes(nodes, from, to))
    }
}

impl fmt::Debug for BeforeLeading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BeforeLeading({})", self.0.get().is_some())
    }
}

impl Nodes {
    /// Has `notes` called, with a node and the one that its users are led to, while these are held
    /// up: they go on when what it returns is done, and stay if that fails. The first call decides.
    pub fn before_leading(
        &self,
        notes: impl Fn(&Nodes, &str, &str) -> Note + Send + Sync + 'static,
    ) {
        let _ = self.before_leading.0.set(Box::new(notes));
    }
}

//! [`GraphMemo`]: what lists of all nodes say of the graph, as it was found last; `graph_memo.rs` fills it.

use std::sync::Arc;

/// A node's place in the graph.
#[derive(Debug, PartialEq)]
pub struct Position {
    /// Its name.
    pub name: String,
    /// The name of its driver.
    pub driver: &'static str,
    /// The numbers of nodes that it stands on, by what they are to it.
    pub(crate) children: Vec<(String, usize)>,
    /// Of the filter of a job, the number of the node that it is in front of.
    pub(crate) behind: Option<usize>,
    /// It shows what one of its children does.
    pub is_filter: bool,
    /// Another node stands on it, or it belongs to a job: it is what one puts somewhere else, and nobody
    /// uses it beside.
    pub is_below: bool,
    /// Jobs that work with it.
    pub jobs: Vec<String>,
}

/// The names of the files of all nodes, and what images said that they stand on when these were found.
#[derive(Debug)]
pub(crate) struct Filenames {
    pub(crate) backing_texts: Vec<Option<String>>,
    pub(crate) filenames: Arc<[Option<Arc<str>>]>,
}

/// See the module's head. All lists are in the order of the nodes' names.
#[derive(Debug, Default)]
pub(crate) struct GraphMemo {
    /// The number of changes at which all of it was found.
    changes: u64,
    pub(crate) positions: Option<Vec<Arc<Position>>>,
    pub(crate) filenames: Option<Filenames>,
    /// The numbers of nodes in the order in which QEMU makes them.
    pub(crate) making: Option<Arc<[usize]>>,
}

impl GraphMemo {
    /// What is remembered, if there were as many changes by then.
    pub(crate) fn take(&mut self, changes: u64) -> GraphMemo {
        match std::mem::take(self) {
            known if known.changes == changes => known,
            _ => GraphMemo {
                changes,
                ..GraphMemo::default()
            },
        }
    }
}

//! The bitmaps that exports show, of nodes that may be opened anew.
//!
//! Invariants:
//! - Before users of a node that was opened anew go on, exports show the bitmap of the image that is open
//!   now: one that was closed notes no writes any more.
//! - Where the bitmap is not found again everything is dirty: a backup copies too much, never too little.

use vellum::Result;
use vellum::qcow2::BitmapView;

use crate::live::node_bitmaps::{ShownBitmap, all_dirty};
use crate::live::nodes::Nodes;
use crate::node::errors::MADE_UP;
use crate::node_bitmap::{self, BitmapState, NodeBitmap};

impl Nodes {
    /// Finds a bitmap by its name, in a node or in the next one below it that has one of the name; says which.
    ///
    /// # Errors
    /// As [`node_bitmap::find`].
    pub async fn find_bitmap(
        &self,
        from: &str,
        name: &str,
    ) -> Result<Option<(String, NodeBitmap, BitmapState)>> {
        for node in self.shown_chain(from) {
            if let Some((bitmap, state)) = node_bitmap::find(self, &node, name).await? {
                return Ok(Some((node, bitmap, state)));
            }
        }
        Ok(None)
    }

    /// Keeps a bitmap for an export that shows it: [`Nodes::hide_bitmap`] takes the number.
    pub fn show_bitmap(&self, shown: ShownBitmap) -> u64 {
        let mut state = self.lock();
        state.next_shown += 1;
        let number = state.next_shown;
        if let Some(node) = state.nodes.get_mut(&shown.node) {
            node.bitmaps.shown.push((number, shown));
        }
        number
    }

    /// Ends what [`Nodes::show_bitmap`] began.
    pub fn hide_bitmap(&self, number: u64) {
        for node in self.lock().nodes.values_mut() {
            node.bitmaps.shown.retain(|(other, _)| *other != number);
        }
    }

    /// Has exports that show bitmaps of a node call all of their disks dirty, and these bitmaps be shown no
    /// more: users write elsewhere.
    pub fn show_all_dirty(&self, node: &str) {
        let mut state = self.lock();
        let shown = state
            .nodes
            .get_mut(node)
            .map(|node| &mut node.bitmaps.shown);
        for (_, one) in shown.map(std::mem::take).unwrap_or_default() {
            one.view.turn_to(&all_dirty());
        }
    }

    /// Whether an export shows a bitmap of a node.
    pub fn shows_bitmap(&self, node: &str, name: &str) -> bool {
        let state = self.lock();
        let shown = state.nodes.get(node).map(|node| &node.bitmaps.shown);
        shown.is_some_and(|shown| shown.iter().any(|(_, one)| one.name == name))
    }

    /// The bitmaps that exports show of nodes which are about to be opened anew, and of what only these know.
    pub(crate) fn shown_with(
        &self,
        names: impl Iterator<Item = String>,
    ) -> Vec<(u64, ShownBitmap)> {
        let state = self.lock();
        let mut all: Vec<(u64, ShownBitmap)> = Vec::new();
        for name in names {
            let below = state.with_below(&name).into_iter();
            let own = below.filter(|below| *below == name || below.starts_with(MADE_UP));
            let nodes = own.filter_map(|name| state.nodes.get(name));
            all.extend(nodes.flat_map(|node| node.bitmaps.shown.iter().cloned()));
        }
        all.sort_by_key(|(number, _)| *number);
        all.dedup_by_key(|(number, _)| *number);
        all
    }

    /// Has exports show these bitmaps as they are in the nodes that were opened anew.
    pub(crate) async fn show_anew(&self, shown: Vec<(u64, ShownBitmap)>) {
        for (number, mut one) in shown {
            let Ok(Some((node, view))) = self.view_again(&one).await else {
                one.view.turn_to(&all_dirty());
                continue;
            };
            one.view.turn_to(&view);
            if node != one.node {
                // What only the one above knows has another name each time.
                one.node = node;
                if let Some(node) = self.lock().nodes.get_mut(&one.node) {
                    node.bitmaps.shown.push((number, one));
                }
            }
        }
    }

    async fn view_again(&self, shown: &ShownBitmap) -> Result<Option<(String, BitmapView)>> {
        let (node, bitmap) = match self.contains(&shown.node) {
            true => match node_bitmap::find(self, &shown.node, &shown.name).await? {
                Some((bitmap, _)) => (shown.node.clone(), bitmap),
                None => return Ok(None),
            },
            false => match self.find_bitmap(&shown.from, &shown.name).await? {
                Some((node, bitmap, _)) => (node, bitmap),
                None => return Ok(None),
            },
        };
        Ok(Some((node, bitmap.view().await?)))
    }
}

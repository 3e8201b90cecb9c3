//! The live graph: open nodes by name, who uses which, and what is noted of them. Nothing is opened here.
//!
//! Nodes that are *live* ([`Nodes::live`]) can be changed while they are used: each user
//! holds a [`Link`](vellum::nodes::Link) of its own, and what changes the graph drains the links that lead to
//! a node and sets them. There every node has a name, if need be one that was made up, as
//! in QEMU.
//!
//! Invariants:
//! - Nodes do not stand on each other in a circle: a new one knows only nodes that are there already, and a
//!   use that would close a circle, through whatever nodes, is refused (`access.rs`).
//! - A node is closed after those that stand on it. One with a name that somebody gave it
//!   is not closed by them: others may stand on it later.
//! - What a failed change has made is gone, and its names are free again.
//! - The graph changes in one turn after the other ([`Nodes::take_turn`]), and nodes are opened beside
//!   these (`new_node.rs`).

pub(crate) mod access;
pub(crate) mod activity;
pub(crate) mod bases;
pub(crate) mod bitmaps;
pub(crate) mod child_access;
pub(crate) mod descriptions;
pub(crate) mod graph_memo;
pub(crate) mod inventory;
pub(crate) mod joining;
pub(crate) mod known_servers;
pub(crate) mod leading;
pub(crate) mod leads;
pub(crate) mod moments;
pub(crate) mod names;
pub(crate) mod new_node;
pub(crate) mod node;
pub(crate) mod node_bitmaps;
pub(crate) mod node_table;
pub(crate) mod nodes;
pub(crate) mod notices;
pub(crate) mod openings;
pub(crate) mod owned;
pub(crate) mod positions;
pub(crate) mod registering;
pub(crate) mod relations;
pub(crate) mod servers;
pub(crate) mod shared;
pub(crate) mod shown;
pub(crate) mod state;
pub(crate) mod users;
pub(crate) mod uses;
pub(crate) mod watch;

pub use crate::node::errors::{inactive_child, unknown, unknown_node};
pub use crate::node::place::Turns;
pub use descriptions::DescriptionMemo;
pub use inventory::{Inventory, NodeState, Wanted};
pub use joining::NodeUse;
pub use leads::{Leads, Step};
pub use new_node::{NameClaim, NewNode};
pub use node_bitmaps::ShownBitmap;
pub use nodes::{Nodes, Turn};
pub use notices::{NodeNotice, NoticeSink};
pub use positions::Position;
pub use uses::{BETWEEN, Changes, Keeps, OVERLAY, Passes, RequiredAccess, User};

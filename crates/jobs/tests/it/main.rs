//! What jobs do, in one program: linked once, and with its tests beside each other.

mod commit_order;
mod devices;
mod live;
mod order;
mod rebase;
mod share;
mod transfer;

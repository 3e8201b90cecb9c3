//! Nodes by themselves: what one is once it is open, and all that is told of where and how it is opened. No graph is known
//! here.

pub mod backing_name;
mod borrowed;
pub mod display;
pub mod driver;
pub mod errors;
pub mod file_node;
pub mod file_policy;
pub mod foreign_image;
pub mod opened;
pub mod origin;
pub mod place;
pub mod quorum_children;

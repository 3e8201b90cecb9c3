//! Opening: nodes with all that they stand on, as far as the policy allows.

pub mod backing;
pub mod context;
pub mod gate;
pub mod node;
mod probe_file;

pub use context::OpenContext;
pub use node::open_node;

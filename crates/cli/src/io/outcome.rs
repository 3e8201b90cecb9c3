//! How a command of a session ends.

/// A command failed, and the reason was printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failed;

/// How a command ended.
pub type Outcome<T = ()> = Result<T, Failed>;

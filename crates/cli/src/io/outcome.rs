//! The result of a command: done, or failed and reported already.

/// A command failed, and the reason was printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failed;

/// How a command ended.
pub type Outcome<T = ()> = Result<T, Failed>;

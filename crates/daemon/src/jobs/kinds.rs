//! What QMP calls jobs, where more than their own file needs it.

/// `x-blockdev-amend`.
pub(crate) const AMEND: &str = "amend";
/// `blockdev-create`.
pub(crate) const CREATE: &str = "create";
/// `blockdev-mirror` and `drive-mirror`.
pub(crate) const MIRROR: &str = "mirror";

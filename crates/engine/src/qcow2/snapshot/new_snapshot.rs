//! What a new snapshot is to be called, and what stands beside it in the table.

/// A snapshot to be made.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NewSnapshot {
    /// Its name; several may have the same.
    pub name: String,
    /// Its identifier, which no other may have; without one it gets the next number.
    pub id: Option<String>,
    /// When it is taken: seconds since the epoch.
    pub date_seconds: u32,
    /// When it is taken: nanoseconds of the second.
    pub date_nanoseconds: u32,
    /// How long the guest has run, in nanoseconds.
    pub vm_clock_nanoseconds: u64,
    /// Instructions that the guest has executed, where that is recorded.
    pub icount: Option<u64>,
    /// Length of the VM state that was saved ([`save_vm_state`](crate::qcow2::Qcow2::save_vm_state)); with one the
    /// snapshot takes it, and the disk has it no more.
    pub vm_state_size_bytes: u64,
}

//! Memory that was freed goes back to the system.

/// Gives freed memory of the heap back to the system, where the allocator keeps
/// it for later: glibc does. Takes up to a few milliseconds; for rare cleaning.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: malloc_trim takes a number, locks what it looks at itself, and
        // changes nothing but which free pages are mapped.
        unsafe { libc::malloc_trim(0) };
    }
}

//! [`DiskIdentity`]: what a flush is about.

/// Tells the disks of a program apart, as long as they are open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DiskIdentity(usize);

impl DiskIdentity {
    /// That of the device, or storage, that holds the bytes itself, in the place where it stays.
    pub fn of<T: ?Sized>(holder: &T) -> DiskIdentity {
        DiskIdentity(std::ptr::from_ref(holder).addr())
    }
}

//! Nodes that stand on a [`crate::BlockDevice`]: a device as the storage of
//! another format, and copying on read. Nodes on storages are in
//! [`vellum_storage::nodes`].

mod copy_on_read;
mod device_storage;

pub use copy_on_read::CopyOnRead;
pub use device_storage::DeviceStorage;

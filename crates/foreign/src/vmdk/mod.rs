//! VMDK.
pub mod descriptor;
pub mod header;
pub mod marker;
pub mod sesparse;

//! OVA: a virtual machine in one file, a tar file of an OVF descriptor and disks (DMTF DSP0243).
//!
//! | file | what it does |
//! | --- | --- |
//! | `tar` | headers of tar files: pure |
//! | `descriptor` | the XML that names disks and files: pure |
//! | `manifest` | sums of the members: pure |
//! | `package` | finds the members, checks them |
//! | `member` | a member as a storage: a window of the file |
//!
//! `control` opens packages and members by name (`machine.ova#disk1.vmdk`), and whoever embeds this.
//!
//! ```text
//! header machine.ovf | its bytes, padded to 512 | header machine.mf | ... | header disk1.vmdk | ... | zeroes
//! ```
//!
//! Invariants:
//! - No file of the host is opened: names of members lead to places in the package's own file, all of which
//!   lie inside of it.
//! - What is read into memory (descriptor, manifest, names) has a limit each.
//! - Nothing is written.

pub mod descriptor;
pub mod manifest;
mod member;
mod package;
mod plain_name;
pub mod tar;

pub use descriptor::{Descriptor, FileReference, VirtualDisk};
pub use manifest::{Algorithm, Manifest, Sum};
pub use member::MemberStorage;
pub use package::{Member, Package};
pub use plain_name::plain_name;

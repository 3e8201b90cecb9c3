//! Devices over devices, and a device as a storage. Together with
//! [`crate::storage::nodes`] they are what graphs are built from; QEMU's options for
//! all of them are the business of `vellum-graph`.
//!
//! An image over a file on which one write of data fails, and which is asked for a
//! megabyte a second at most:
//!
//! ```
//! use std::sync::Arc;
//! use vellum::gate::DenyAll;
//! use vellum::qcow2::create::{CreateOptions, create};
//! use vellum::qcow2::{OpenOptions, Qcow2};
//! use vellum::storage::nodes::debug::{
//!     Action, DebugStorage, Debugger, Injection, Limits, RequestKind, Rule,
//! };
//! use vellum::storage::nodes::throttle::{Limit, ThrottleGroup, ThrottleLimits, ThrottleStorage};
//! use vellum::io::lane;
//! use vellum::storage::{Event, MemStorage};
//! use vellum::{BlockDevice, Buffer, ErrorKind, RequestFlags, Storage};
//!
//! # lane::block_on(async {
//! let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
//! let options = CreateOptions::default().size_bytes(1 << 30);
//! create(file.clone(), None, &options).await?;
//!
//! let limits = ThrottleLimits { bps_total: Limit::rate(1 << 20), ..Default::default() };
//! let file = Arc::new(ThrottleStorage::new(file, ThrottleGroup::new("slow", limits)));
//! let full_disk = Rule {
//!     event: Event::WriteAio,
//!     state: 0,
//!     action: Action::Inject(Injection {
//!         errno: 28,
//!         kind: Some(RequestKind::Write),
//!         sector: None,
//!         once: true,
//!         immediately: false,
//!     }),
//! };
//! let debugger = Debugger::new(vec![full_disk], |message| println!("{message}"));
//! let file = Arc::new(DebugStorage::new(file, debugger, Limits::default()));
//!
//! let image = Qcow2::open(file, Arc::new(DenyAll), OpenOptions::default()).await?;
//! let write = |offset| image.write(offset, Buffer::copy_of(&[1; 4096]), RequestFlags::default());
//! assert_eq!(write(0).await.unwrap_err().kind(), ErrorKind::NoSpace);
//! write(0).await?;
//! image.close().await?;
//! # Ok::<(), vellum::Error>(())
//! # }).unwrap();
//! ```

mod absent;
mod copy_on_read;
mod device_storage;
mod filter;
mod link;
mod quorum;
mod recorder;

pub use absent::absent;
pub use copy_on_read::CopyOnRead;
pub use device_storage::DeviceStorage;
pub use filter::Filter;
pub(crate) use link::shortcut;
pub use link::{Drained, Link, nothing};
pub use quorum::{
    Quorum, QuorumChild, QuorumListener, QuorumOperation, QuorumOptions, QuorumReport, ReadPattern,
};
pub use recorder::{RecordedDevice, RecordedStorage, Recorder};

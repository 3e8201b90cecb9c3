//! Vellum: a qcow2 storage engine to embed.
//!
//! ```text
//!   your VMM, backup tool or server
//!        |  requests at guest offsets, owned buffers
//!   BlockDevice   Qcow2, Raw, LuksDevice, nodes::Link, nodes::CopyOnRead ...
//!        |  maps guest offsets to host offsets, keeps metadata crash-safe
//!   Storage       FileStorage, MemStorage, NBD client, your own
//!        |  requests at host offsets
//!   lane          one thread's io_uring (or worker threads) and executor
//! ```
//!
//! A [`BlockDevice`] is what a guest sees. A [`Storage`] is where the bytes of an image
//! live. A [`Gate`](gate::Gate) decides which other files an image may open: backing files
//! and data files. Opening an image opens nothing except through its gate; the example of
//! [`gate::Folder`] opens a chain.
//!
//! # Create, write, read
//!
//! ```
//! use std::sync::Arc;
//! use vellum::gate::DenyAll;
//! use vellum::io::lane;
//! use vellum::qcow2::create::{CreateOptions, create};
//! use vellum::qcow2::{OpenOptions, Qcow2};
//! use vellum::storage::MemStorage;
//! use vellum::{BlockDevice, Buffer, RequestFlags, Storage};
//!
//! lane::block_on(async {
//!     // A file is opened by FileStorage::open(path, &FileOptions::default()).
//!     let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
//!     let options = CreateOptions::default().size_bytes(1 << 30);
//!     create(file.clone(), None, &options).await?;
//!
//!     let image = Qcow2::open(file, Arc::new(DenyAll), OpenOptions::default()).await?;
//!     image.write(4096, Buffer::copy_of(b"hello"), RequestFlags::default()).await?;
//!     image.flush().await?; // Now, and only now, a power cut does not lose it.
//!     let read = image.read(4096, Buffer::for_read(5)).await?;
//!     assert_eq!(&read[..], b"hello");
//!     image.close().await
//! })?;
//! # Ok::<(), vellum::Error>(())
//! ```
//!
//! # Lifecycle
//!
//! Open, requests, [`flush`](BlockDevice::flush) whenever the guest asks for one,
//! [`close`](BlockDevice::close). A device that is dropped without a close loses nothing that
//! was flushed; the next opening finds leaked clusters at worst, and no error. After a close
//! all changes are refused; an image can still be read. Only one program may write to an image:
//! files are locked as QEMU locks them unless
//! [`FileOptions::locks`](storage::FileOptions::locks) says otherwise.
//!
//! # Lanes, threads, cancellation
//!
//! Requests run in a [`lane`](io::lane), the executor and I/O backend of one thread.
//! [`lane::block_on`](io::lane::block_on) makes one for as long as a future takes. Devices
//! and storages are `Send + Sync`: several lanes may use one image at the same time, one for
//! each queue of a guest.
//!
//! A request owns its [`Buffer`] and gives it back. Dropping the [`Io`] of a request gives up
//! the result, never the request: a write may or may not have happened, as after an error.
//!
//! ```
//! # use std::sync::Arc;
//! # use vellum::gate::DenyAll;
//! # use vellum::io::lane;
//! # use vellum::qcow2::create::{CreateOptions, create};
//! # use vellum::qcow2::{OpenOptions, Qcow2};
//! # use vellum::storage::MemStorage;
//! # use vellum::{BlockDevice, Buffer, RequestFlags, Storage};
//! # let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
//! # let options = CreateOptions::default().size_bytes(1 << 30);
//! # lane::block_on(async { create(file.clone(), None, &options).await })?;
//! # let image = lane::block_on(async {
//! #     Qcow2::open(file, Arc::new(DenyAll), OpenOptions::default()).await
//! # })?;
//! let queues: Vec<_> = (0..4u64)
//!     .map(|queue| {
//!         let image = image.clone();
//!         std::thread::spawn(move || {
//!             lane::block_on(async {
//!                 let bytes = Buffer::copy_of(&[queue as u8; 4096]);
//!                 image.write(queue << 20, bytes, RequestFlags::default()).await?;
//!                 image.flush().await
//!             })
//!         })
//!     })
//!     .collect();
//! for queue in queues {
//!     queue.join().expect("a queue's thread")?;
//! }
//! # lane::block_on(async { image.close().await })?;
//! # Ok::<(), vellum::Error>(())
//! ```
//!
//! # An event loop of one's own
//!
//! A program that has a loop gives the lane turns from there: [`lane::fd`](io::lane::fd) can be
//! read when there is something to do, [`lane::turn`](io::lane::turn) does it without waiting,
//! [`lane::spawn`](io::lane::spawn) starts tasks, and their handles may be awaited by any
//! executor of the thread. Other threads use the lane's [`Remote`](io::lane::Remote), whose
//! calls give futures that are `Send`. The examples `epoll`, `tokio` and `queue_threads` are
//! such programs.
//!
//! Threads that block need no lane: see [`blocking`].
//!
//! # Errors
//!
//! An [`Error`] has a stable [`kind`](Error::kind) to decide by, an errno for a guest, the
//! operation, the image and the offset where known, and the error that caused it. Metadata
//! that contradicts itself marks the image corrupt and stops all changes, so that the damage
//! does not spread; so does metadata that cannot be written.
//!
//! # A storage of one's own
//!
//! Seven methods are needed; the others have defaults to be overridden where the storage can
//! do better (holes, discards, copies without moving bytes).
//!
//! ```
//! use vellum::storage::{Storage, WriteFlags, ZeroFlags};
//! use vellum::{Buffers, Io, Result};
//!
//! /// A storage that counts what is written through it.
//! #[derive(Debug)]
//! struct Counting<S>(S, std::sync::atomic::AtomicU64);
//!
//! impl<S: Storage> Storage for Counting<S> {
//!     fn name(&self) -> &str {
//!         self.0.name()
//!     }
//!     fn len_bytes(&self) -> Result<u64> {
//!         self.0.len_bytes()
//!     }
//!     fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
//!         self.0.read(offset_bytes, buffers)
//!     }
//!     fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
//!         self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
//!         self.0.write(offset_bytes, buffers, flags)
//!     }
//!     fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
//!         self.0.write_zeroes(offset_bytes, len_bytes, flags)
//!     }
//!     fn flush(&self) -> Io<()> {
//!         self.0.flush()
//!     }
//!     fn truncate(&self, len_bytes: u64) -> Io<()> {
//!         self.0.truncate(len_bytes)
//!     }
//! }
//! # use std::sync::{Arc, atomic::AtomicU64};
//! # use vellum::{BlockDevice, Raw, RawOptions, Buffer, RequestFlags, storage::MemStorage};
//! # vellum::io::lane::block_on(async {
//! # let counting = Arc::new(Counting(MemStorage::new(), AtomicU64::new(0)));
//! # counting.truncate(4096).await?;
//! # let raw = Raw::open(counting.clone(), RawOptions::default())?;
//! # raw.write(0, Buffer::copy_of(b"x"), RequestFlags::default()).await?;
//! # assert_eq!(counting.1.load(std::sync::atomic::Ordering::Relaxed), 1);
//! # let status = counting.block_status(0, 1 << 20).await?;
//! # assert_eq!(status.len_bytes, 4096);
//! # counting.allocate(0, 8192).await?;
//! # assert_eq!(counting.len_bytes()?, 8192);
//! # Ok::<(), vellum::Error>(())
//! # }).unwrap();
//! ```
//!
//! # More examples
//!
//! Snapshots: [`Qcow2::create_snapshot`](qcow2::Qcow2::create_snapshot). Checks and repairs:
//! [`check`](qcow2::check). Compressed writes: [`BlockDevice::write_compressed`]. Encryption:
//! [`luks`]. A chain whose files may change while it is in use: [`nodes`]. Whole programs:
//! the crate's `examples`.
//!
//! # Invariants
//! - Opening an image never opens another file except through a [`gate::Gate`].
//! - No code of this crate is unsafe.
#![forbid(unsafe_code)]
#![deny(clippy::missing_errors_doc)]

pub mod blocking;
mod debug_events;
mod delegate;
pub mod detect_zeroes;
pub mod device;
pub mod gate;
pub mod luks;
pub mod nodes;
mod preallocation;
pub mod qcow2;
pub mod raw;

pub use device::{
    BlockDevice, DeviceInfo, DiskIdentity, Extent, ExtentKind, HostLocation, RequestFlags,
    ZeroRequest, target_of,
};
pub use preallocation::Preallocation;
pub use raw::{Raw, RawOptions};
pub use vellum_format::{Geometry, Header};
pub use vellum_io::shared_memory::SharedBuffer;
pub use vellum_io::{Buffer, Buffers, Error, ErrorKind, Io, Result};
pub use vellum_storage::Storage;

/// How requests run: what an embedder needs of `vellum-io`.
pub mod io {
    pub use vellum_io::buffer::{Buffer, Buffers};
    pub use vellum_io::{ErrorKind, Io, JoinHandle, finish_all, lane, spawn, spawn_to_completion};
}

/// Where the bytes of images live: what an embedder needs of `vellum-storage`.
pub mod storage {
    pub use vellum_storage::event::Suspension;
    pub use vellum_storage::file::{
        self, AsFile, Create, FileKind, FileOptions, FileStorage, Locks,
    };
    pub use vellum_storage::lock::{PermissionSet, Permissions};
    pub use vellum_storage::{
        BlockStatus, Capabilities, Event, EventListener, MemStorage, Storage, StorageExtent,
        StorageIdentity, WriteFlags, ZeroFlags, nodes,
    };
}

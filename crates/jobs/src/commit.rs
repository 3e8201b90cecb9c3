//! Commit: writes what an image holds itself, and what the layers between hold, into an
//! image further down its chain.
//!
//! Invariant: the image is emptied only after the base has everything, durably.

use std::fmt;
use std::sync::Arc;

use vellum::{BlockDevice, Error, ErrorKind, Result};

use crate::copy::{CopyError, CopyOptions, Observer, copy};
use crate::rate::Speed;
use crate::scope::Scope;

/// How a commit is done.
#[derive(Debug, Clone)]
pub struct CommitOptions {
    /// How many layers are committed: 1 for the image alone, 2 for it and its backing
    /// file, and so on. The next one below is the base.
    pub layers: u32,
    /// Unmap everything in the image when the base has it all, durably.
    pub empty_top: bool,
    /// How many pieces are in flight at once.
    pub parallel: usize,
    /// How fast it may be done.
    pub speed: Arc<Speed>,
}

impl Default for CommitOptions {
    fn default() -> Self {
        CommitOptions {
            layers: 1,
            empty_top: true,
            parallel: CopyOptions::default().parallel,
            speed: Arc::default(),
        }
    }
}

/// Why a commit failed. The image still shows what it did.
#[derive(Debug, Clone)]
pub enum CommitError {
    /// The base could not be made as long as the image.
    Grow(Error),
    /// Copying failed.
    Copy(CopyError),
    /// What was copied could not be made durable.
    Flush(Error),
    /// The base has everything, but the image could not be emptied.
    Empty(Error),
}

impl CommitError {
    /// The failure below.
    pub fn cause(&self) -> &Error {
        match self {
            CommitError::Copy(error) => &error.cause,
            CommitError::Grow(error) | CommitError::Flush(error) | CommitError::Empty(error) => {
                error
            }
        }
    }
}

impl fmt::Display for CommitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, error) = match self {
            CommitError::Copy(error) => return error.fmt(f),
            CommitError::Grow(error) => ("growing the base", error),
            CommitError::Flush(error) => ("flushing the base", error),
            CommitError::Empty(error) => ("emptying the image", error),
        };
        write!(f, "error while {what}: {}", error.message())
    }
}

impl std::error::Error for CommitError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(self.cause())
    }
}

/// Commits `top` into `base`, a device of its own that is open for writing, of the image
/// that stands `options.layers` below `top`. A base that is shorter grows.
///
/// A power cut at any moment leaves `top` showing what it did: the base gets what the
/// image shows anyway, and the image is emptied only after that is durable. Meanwhile
/// nobody may write to any of them. Images between show nothing useful afterwards.
///
/// ```
/// use std::sync::Arc;
///
/// use vellum::gate::DenyAll;
/// use vellum::qcow2::create::{CreateOptions, create};
/// use vellum::qcow2::{Backing, OpenOptions, Qcow2};
/// use vellum::{BlockDevice, Buffer, RequestFlags};
/// use vellum_jobs::commit::{CommitOptions, commit};
/// use vellum_jobs::copy::Silent;
/// use vellum_io::lane;
/// use vellum_storage::MemStorage;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// lane::block_on(async {
///     let (base_file, top_file) = (Arc::new(MemStorage::new()), Arc::new(MemStorage::new()));
///     let options = CreateOptions::default().size_bytes(1 << 20);
///     create(base_file.clone(), None, &options).await?;
///     create(top_file.clone(), None, &options).await?;
///
///     // A commit needs the base open for writing; the image on top stands on the same.
///     let gate = Arc::new(DenyAll);
///     let base = Qcow2::open(base_file, gate.clone(), OpenOptions::default()).await?;
///     let base: Arc<dyn BlockDevice> = base;
///     let over = OpenOptions::default().backing(Backing::Given(base.clone()));
///     let top: Arc<dyn BlockDevice> = Qcow2::open(top_file, gate, over).await?;
///     top.write(4096, Buffer::copy_of(&[7; 512]), RequestFlags::default()).await?;
///
///     commit(&top, &base, &CommitOptions::default(), &mut Silent).await?;
///     assert!(base.read(4096, Buffer::for_read(512)).await?.iter().all(|&byte| byte == 7));
///     let status = top.block_status(0, 1 << 20, 0).await?;
///     assert!(!status.kind.is_present(), "the top holds nothing");
///     top.close().await?;
///     base.close().await?;
///     Ok(())
/// })
/// # }
/// ```
///
/// # Errors
/// The first step that failed, and why. What was copied before stays in the base.
pub async fn commit(
    top: &Arc<dyn BlockDevice>,
    base: &Arc<dyn BlockDevice>,
    options: &CommitOptions,
    observer: &mut dyn Observer,
) -> Result<(), CommitError> {
    let size_bytes = top.size_bytes();
    if base.size_bytes() < size_bytes {
        base.truncate(size_bytes).await.map_err(CommitError::Grow)?;
    }
    let copying = CopyOptions {
        scope: Scope::Layers(options.layers),
        detect_zeroes: false,
        share_blocks: true,
        parallel: options.parallel,
        speed: options.speed.clone(),
        ..CopyOptions::default()
    };
    copy(std::slice::from_ref(top), base, &copying, observer)
        .await
        .map_err(CommitError::Copy)?;
    base.flush().await.map_err(CommitError::Flush)?;
    if !options.empty_top {
        return Ok(());
    }
    match top.clear().await {
        // A format that cannot do that keeps what it holds: the same as the base.
        Err(error) if error.kind() != ErrorKind::Unsupported => Err(CommitError::Empty(error)),
        _ => Ok(()),
    }
}

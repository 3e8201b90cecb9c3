//! A lane on a thread of tokio's: tasks of both await each other.
//!
//! ```sh
//! cargo run --example tokio -- disk.qcow2
//! ```

use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::{Either, select};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::{LocalSet, spawn_blocking, spawn_local};
use vellum::gate::DenyAll;
use vellum::io::lane;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{OpenOptions, Qcow2};
use vellum::storage::{Create, FileOptions, FileStorage};
use vellum::{BlockDevice, Buffer, RequestFlags, Result};

fn main() -> Result<()> {
    let path = std::env::args_os().nth(1).unwrap_or("disk.qcow2".into());
    run(Path::new(&path))
}

/// Runs a lane and a server of tokio's on one thread; other threads of the runtime reach the
/// lane through its [`lane::Remote`].
pub fn run(path: &Path) -> Result<()> {
    let path = path.to_owned();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    LocalSet::new().block_on(&runtime, async {
        let driver = spawn_local(drive_lane());
        match select(pin!(use_lane(path)), driver).await {
            Either::Left((done, driver)) => {
                driver.abort();
                done
            }
            // Without turns nothing in the lane would ever end. A panic of any task of the
            // lane comes out of its turn, and tokio would keep it until somebody asks.
            Either::Right((Ok(ended), _)) => ended,
            Either::Right((Err(panicked), _)) => resume_unwind(panicked.into_panic()),
        }
    })
}

async fn use_lane(path: PathBuf) -> Result<()> {
    // On the lane's own thread: start a task there and await its handle.
    let image = lane::spawn(async {
        let file = FileStorage::open(path, &FileOptions::default().create(Create::Truncate))?;
        create(
            file.clone(),
            None,
            &CreateOptions::default().size_bytes(1 << 20),
        )
        .await?;
        Qcow2::open(file, Arc::new(DenyAll), OpenOptions::default()).await
    })
    .await?;

    // From tasks that may run on any thread: calls, whose futures are `Send`.
    let remote = lane::remote();
    let writer = image.clone();
    let client = spawn_blocking(move || write_from_elsewhere(&remote, &writer));
    client.await.expect("the client's thread")?;

    let reader = image.clone();
    let read = lane::spawn(async move { reader.read(0, Buffer::for_read(4096)).await });
    assert!(read.await?.iter().all(|&byte| byte == 1));
    lane::spawn(async move { image.close().await }).await
}

/// Gives the lane its turns for as long as the runtime runs.
async fn drive_lane() -> Result<()> {
    // SAFETY: an owned descriptor stays the same and open until it is dropped.
    let fd = unsafe { AsyncFd::register_with_interest(lane::fd()?, Interest::READABLE) };
    let fd = fd.map_err(std::io::Error::from)?;
    loop {
        let mut ready = fd.readable().await?;
        lane::turn();
        // Whatever has come since the turn is an event of its own.
        ready.clear_ready();
    }
}

/// Another runtime, on another thread.
fn write_from_elsewhere(remote: &lane::Remote, image: &Arc<Qcow2>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(async {
        let image = image.clone();
        remote
            .call(move || async move {
                let bytes = Buffer::copy_of(&[1; 4096]);
                image.write(0, bytes, RequestFlags::default()).await?;
                image.flush().await
            })
            .await
    })
}

//! A loop over epoll, as a VMM has one, drives a lane besides its own descriptors.
//!
//! ```sh
//! cargo run --example epoll -- disk.qcow2
//! ```

use std::cell::Cell;
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use vellum::gate::DenyAll;
use vellum::io::lane;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{OpenOptions, Qcow2};
use vellum::storage::{Create, FileOptions, FileStorage};
use vellum::{BlockDevice, Buffer, RequestFlags, Result};

const LANE: u64 = 0;
const COMMANDS: u64 = 1;

fn main() -> Result<()> {
    let path = std::env::args_os().nth(1).unwrap_or("disk.qcow2".into());
    run(Path::new(&path))
}

/// Makes an image and writes to it what comes over a socket, from one loop.
pub fn run(path: &Path) -> Result<()> {
    let path = path.to_owned();
    // Before the loop runs, or after it, blocking is fine.
    let image = lane::block_on(async {
        let file = FileStorage::open(path, &FileOptions::default().create(Create::Truncate))?;
        create(
            file.clone(),
            None,
            &CreateOptions::default().size_bytes(1 << 20),
        )
        .await?;
        Qcow2::open(file, Arc::new(DenyAll), OpenOptions::default()).await
    })?;

    let (mut commands, sender) = UnixStream::pair()?;
    commands.set_nonblocking(true)?;
    let client = std::thread::spawn(move || send_commands(sender));

    let lane_fd = lane::fd()?;
    let events = epoll::create(CreateFlags::CLOEXEC).map_err(std::io::Error::from)?;
    for (data, fd) in [(LANE, lane_fd.as_fd()), (COMMANDS, commands.as_fd())] {
        let data = EventData::new_u64(data);
        epoll::add(&events, fd, data, EventFlags::IN).map_err(std::io::Error::from)?;
    }

    let writes_in_flight = Rc::new(Cell::new(0));
    let mut connected = true;
    let mut ready = [MaybeUninit::uninit(); 8];
    while connected || writes_in_flight.get() > 0 {
        let (ready, _) = match epoll::wait(&events, &mut ready, None) {
            Err(rustix::io::Errno::INTR) => continue,
            result => result.map_err(std::io::Error::from)?,
        };
        for event in ready {
            match event.data.u64() {
                LANE => lane::turn(),
                _ => {
                    connected = take_commands(&mut commands, &image, &writes_in_flight)?;
                    if !connected {
                        epoll::delete(&events, &commands).map_err(std::io::Error::from)?;
                    }
                }
            }
        }
    }
    client.join().expect("the client's thread")?;

    lane::block_on(async {
        let read = image.read(7 * 512, Buffer::for_read(512)).await?;
        assert!(read.iter().all(|&byte| byte == 7));
        image.close().await
    })
}

/// Starts a write for each command; a task of the lane waits for its end. `false`: no
/// more will come.
fn take_commands(
    commands: &mut UnixStream,
    image: &Arc<Qcow2>,
    writes_in_flight: &Rc<Cell<u32>>,
) -> Result<bool> {
    let mut sectors = [0; 64];
    loop {
        let count = match commands.read(&mut sectors) {
            Ok(0) => return Ok(false),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(true),
            result => result?,
        };
        for &sector in &sectors[..count] {
            let (image, in_flight) = (image.clone(), writes_in_flight.clone());
            in_flight.set(in_flight.get() + 1);
            drop(lane::spawn(async move {
                let bytes = Buffer::copy_of(&[sector; 512]);
                let offset_bytes = u64::from(sector) * 512;
                let written = image
                    .write(offset_bytes, bytes, RequestFlags::default())
                    .await;
                in_flight.set(in_flight.get() - 1);
                if let Err(error) = written {
                    eprintln!("sector {sector}: {error}");
                }
            }));
        }
    }
}

fn send_commands(mut sender: UnixStream) -> Result<()> {
    for sector in 0..100 {
        sender.write_all(&[sector])?;
    }
    Ok(())
}

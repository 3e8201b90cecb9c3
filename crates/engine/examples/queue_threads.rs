//! A VMM's queue threads: each has an event descriptor that the guest kicks, a lane, and the
//! image that all of them share.
//!
//! ```sh
//! cargo run --example queue_threads -- disk.qcow2
//! ```

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use vellum::gate::DenyAll;
use vellum::io::lane;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{OpenOptions, Qcow2};
use vellum::storage::{Create, FileOptions, FileStorage};
use vellum::{BlockDevice, Buffer, RequestFlags, Result};

const QUEUES: u64 = 4;
const REQUESTS: u64 = 64;
const QUEUE_BYTES: u64 = 1 << 20;

/// What a guest puts into a queue: here, a write of 4 KiB.
struct Request {
    offset_bytes: u64,
    byte: u8,
}

/// The guest's end of a queue.
struct Guest {
    requests: Sender<Request>,
    completions: Receiver<Result<()>>,
    kick: Arc<OwnedFd>,
}

fn main() -> Result<()> {
    let path = std::env::args_os().nth(1).unwrap_or("disk.qcow2".into());
    run(Path::new(&path))
}

/// Has four queues with a thread each write to one image.
pub fn run(path: &Path) -> Result<()> {
    let path = path.to_owned();
    let image = lane::block_on(async {
        let file = FileStorage::open(path, &FileOptions::default().create(Create::Truncate))?;
        let options = CreateOptions::default().size_bytes(QUEUES * QUEUE_BYTES);
        create(file.clone(), None, &options).await?;
        Qcow2::open(file, Arc::new(DenyAll), OpenOptions::default()).await
    })?;

    let mut guests = Vec::new();
    let mut threads = Vec::new();
    for _ in 0..QUEUES {
        let (requests, taken) = mpsc::channel();
        let (completed, completions) = mpsc::channel();
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let kick = Arc::new(eventfd(0, flags).map_err(std::io::Error::from)?);
        let (image, kicked) = (image.clone(), kick.clone());
        threads.push(thread::spawn(move || {
            serve(&image, &kicked, &taken, &completed)
        }));
        guests.push(Guest {
            requests,
            completions,
            kick,
        });
    }
    for (queue, guest) in (0..).zip(guests) {
        guest.write_all(queue)?;
    }
    for queue in threads {
        queue.join().expect("a queue's thread")?;
    }

    lane::block_on(async {
        image.flush().await?;
        let last = image.read((QUEUES - 1) * QUEUE_BYTES, Buffer::for_read(4096));
        assert!(last.await?.iter().all(|&byte| u64::from(byte) == QUEUES));
        image.close().await
    })
}

/// One queue's thread: a loop of the VMM's own over two descriptors.
fn serve(
    image: &Arc<Qcow2>,
    kick: &OwnedFd,
    requests: &Receiver<Request>,
    completions: &Sender<Result<()>>,
) -> Result<()> {
    let lane_fd = lane::fd()?;
    let in_flight = Rc::new(Cell::new(0_u32));
    let mut connected = true;
    while connected || in_flight.get() > 0 {
        let mut ready = [
            PollFd::new(&lane_fd, PollFlags::IN),
            PollFd::new(kick, PollFlags::IN),
        ];
        match poll(&mut ready, None) {
            Err(rustix::io::Errno::INTR) => continue,
            result => result.map_err(std::io::Error::from)?,
        };
        let [lane_ready, kicked] = ready.map(|fd| !fd.revents().is_empty());
        if kicked {
            let _ = rustix::io::read(kick, &mut [0; 8]);
            connected = take_requests(image, requests, completions, &in_flight);
        }
        if lane_ready {
            lane::turn();
        }
    }
    // The image may still have work for this lane that other queues wait for.
    lane::finish();
    Ok(())
}

/// Starts all that stands in the queue. `false`: the guest is gone.
fn take_requests(
    image: &Arc<Qcow2>,
    requests: &Receiver<Request>,
    completions: &Sender<Result<()>>,
    in_flight: &Rc<Cell<u32>>,
) -> bool {
    loop {
        let request = match requests.try_recv() {
            Ok(request) => request,
            Err(TryRecvError::Empty) => return true,
            Err(TryRecvError::Disconnected) => return false,
        };
        in_flight.set(in_flight.get() + 1);
        let (image, in_flight, completions) =
            (image.clone(), in_flight.clone(), completions.clone());
        drop(lane::spawn(async move {
            let bytes = Buffer::copy_of(&[request.byte; 4096]);
            let flags = RequestFlags::default();
            let written = image.write(request.offset_bytes, bytes, flags).await;
            in_flight.set(in_flight.get() - 1);
            // A guest that is gone wants no completion.
            let _ = completions.send(written.map(drop));
        }));
    }
}

impl Guest {
    fn write_all(self, queue: u64) -> Result<()> {
        for n in 0..REQUESTS {
            let request = Request {
                offset_bytes: queue * QUEUE_BYTES + n * 4096,
                byte: (queue + 1) as u8,
            };
            self.requests
                .send(request)
                .expect("the queue's thread runs");
            self.kick()?;
        }
        for _ in 0..REQUESTS {
            self.completions.recv().expect("a completion for each")?;
        }
        let Guest { requests, kick, .. } = self;
        drop(requests);
        kick_queue(&kick)
    }

    fn kick(&self) -> Result<()> {
        kick_queue(&self.kick)
    }
}

fn kick_queue(kick: &OwnedFd) -> Result<()> {
    rustix::io::write(kick, &1_u64.to_ne_bytes()).map_err(std::io::Error::from)?;
    Ok(())
}

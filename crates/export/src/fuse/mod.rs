//! A regular file on which a disk appears: a FUSE server for one file.
//!
//! [`Export::new`] mounts over a file and serves it from threads of its own, each a lane with a
//! descriptor of its own. `proto` is the messages, `mount` and `clone` the way to the kernel,
//! `session` one descriptor's service, `file` what is done to the disk. There is no library
//! between: those that there are bring threads that block, and requests here run on lanes.
//! `queue` is how requests come where the kernel has FUSE over io_uring.
//!
//! Invariants:
//! - The kernel is trusted, but no message is read beyond its end.
//! - The threads that serve a mount never use it, nor wait for one who does.

mod clone;
mod file;
mod mount;
mod mount_id;
mod proto;
mod queue;
mod session;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use event_listener::Event;
use vellum::BlockDevice;
use vellum_io::lane::message::MessageDevice;
use vellum_io::lane::{self, LaneOptions};
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Result};

use crate::accounting::Accounting;
use crate::fair_depth::FairDepth;
use crate::nbd::Stop;
use crate::nbd::lanes::{LaneSlot, Lanes, end as end_lanes};
use crate::room::WhenFull;
use crate::size_turns::SizeTurns;
use file::{File, Rights};
use mount::Mount;
use proto::{HEADER_BYTES, Header, Init, Operation, Welcome};
use queue::LaneQueues;
use session::{End, Session};

/// Most that one request reads or writes, in bytes: what the kernel has at most.
const MAX_TRANSFER_BYTES: usize = 1 << 20;
/// Requests that nobody waits for, such as asynchronous ones, that the kernel sends at once.
const MAX_BACKGROUND: u16 = 128;

/// Whether others than the user who mounts may use the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AllowOther {
    /// Only that user, and not even root.
    Off,
    /// Everybody, as far as the file's mode says.
    On,
    /// Everybody, if that may be: a user must be allowed to by `/etc/fuse.conf`.
    #[default]
    Auto,
}

/// Threads that wait at `/dev/fuse` at most. The kernel wakes the one that has waited longest, so with more of
/// them each request of few readers comes to one whose processor has gone to sleep, and a lane serves many
/// requests at a time. Over io_uring each processor has a queue, and a lane of its own.
const MOST_DEVICE_LANES: usize = 4;

/// How requests come from the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// Over io_uring where the kernel has that (Linux 6.14) and it is switched on, else over
    /// `/dev/fuse`.
    #[default]
    Auto,
    /// Over `/dev/fuse`.
    Device,
    /// Over io_uring, or not at all.
    IoUring,
}

vellum_io::with_setters! {
    /// How a disk is shown.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct ExportOptions {
        /// Writes are taken.
        pub writable: bool,
        /// Writes beyond the end make the disk longer.
        pub growable: bool,
        /// The size may be set (`truncate`, `fallocate`) also where it does not grow by writes.
        pub resizable: bool,
        /// Who may use it.
        pub allow_other: AllowOther,
        /// Most threads that serve it; over `/dev/fuse` four at most, whatever is said here.
        pub max_lanes: usize,
        /// How requests come.
        pub transport: Transport,
        /// Exports that it must not keep waiting.
        pub fair_depth: FairDepth,
        /// What becomes of requests for which the device has no room.
        pub when_full: WhenFull,
        /// Held by whoever changes the size of the disk, this export and others.
        pub size_turns: SizeTurns,
    }
}

impl Default for ExportOptions {
    /// To be read by everybody, as far as that may be.
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        ExportOptions {
            writable: false,
            growable: false,
            resizable: false,
            allow_other: AllowOther::Auto,
            max_lanes: processors,
            transport: Transport::Auto,
            fair_depth: FairDepth::default(),
            when_full: WhenFull::Fail,
            size_turns: SizeTurns::default(),
        }
    }
}

/// Takes away what servers that have died have left mounted at `mountpoint`. To be called before an image is
/// opened that may lie below: an image can be mounted over itself.
pub fn remove_dead_mounts(mountpoint: &Path) {
    mount::remove_dead(mountpoint);
}

/// A disk that is mounted.
pub struct Export {
    mountpoint: PathBuf,
    shared: Arc<Shared>,
    mount: RefCell<Mount>,
    lanes: RefCell<Lanes>,
    /// Requests come over io_uring.
    has_queues: Cell<bool>,
}

/// What sessions share.
struct Shared {
    file: Arc<File>,
    stop: Stop,
    running: AtomicUsize,
    /// A session has ended.
    ended: Event,
    /// The mount is gone.
    unmounted: Stop,
}

impl Export {
    /// Mounts `device` over the regular file `mountpoint` and serves it. Whatever a server that
    /// died has left mounted there is taken away first. Must run inside a lane.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if `mountpoint` is no regular file;
    /// [`ErrorKind::Unsupported`] where the kernel has no FUSE, or one that is too old; else
    /// what the system says, and what to do about it.
    pub async fn new(
        device: Arc<dyn BlockDevice>,
        mountpoint: impl Into<PathBuf>,
        options: &ExportOptions,
    ) -> Result<Export> {
        let mountpoint = mountpoint.into();
        mount::prepare(&mountpoint)?;
        let source = device.info().name;
        let (mount, descriptor, allow_other) =
            mount::mount(&mountpoint, &source, options.allow_other, !options.writable)?;
        let kernel = MessageDevice::new(descriptor, mount::DEVICE)?;
        let wants_queues = wants_queues(options.transport, queue::is_switched_on());
        let devices = devices(kernel, lane_count(options.max_lanes, wants_queues));
        let rights = Rights {
            writable: options.writable,
            growable: options.growable,
            resizable: options.resizable || options.growable,
            allow_other,
        };
        let stop = Stop::new();
        let accounting = Arc::new(Accounting::among(&options.fair_depth));
        let device = {
            let stop = stop.clone();
            let goes_on = move || !stop.is_requested();
            let room = &accounting.room;
            options.when_full.around(&device, room, goes_on)
        };
        let shared = Arc::new(Shared {
            file: Arc::new(File::new(
                device,
                accounting,
                rights,
                options.size_turns.clone(),
                stop.clone(),
            )),
            stop,
            running: AtomicUsize::new(0),
            ended: Event::new(),
            unmounted: Stop::new(),
        });
        let queues = queues(options.transport, wants_queues, devices.len())?;
        let export = Export {
            mountpoint,
            shared,
            mount: RefCell::new(mount),
            lanes: RefCell::new(lanes_for(devices.len(), queues.as_deref())),
            has_queues: Cell::new(false),
        };
        match export.start(devices, queues, options.transport).await {
            Ok(()) => Ok(export),
            Err(error) => {
                export.end().await;
                Err(error)
            }
        }
    }

    /// Serves on other lanes than the calling one, which may be who looks at the file.
    async fn start(
        &self,
        devices: Vec<MessageDevice>,
        queues: Option<Vec<LaneQueues>>,
        transport: Transport,
    ) -> Result<()> {
        let slots: Vec<_> = {
            let mut lanes = self.lanes.borrow_mut();
            let (_own, _own_slot) = lanes.take_slot();
            devices.iter().map(|_| lanes.take_slot()).collect()
        };
        // Once the kernel is told of queues it waits for all of them.
        let mut queues = queues;
        for (remote, _) in &slots {
            let asked = remote.call(|| async { Ok(lane::takes_commands()) });
            let takes_commands = queues.is_some() && asked.await?;
            queues = queues.filter(|_| takes_commands);
        }
        let offered = greet(&devices[0], queues.is_some()).await?;
        let queues = queues.filter(|_| offered);
        if queues.is_none() && transport == Transport::IoUring {
            return Err(no_queues());
        }
        self.has_queues.set(queues.is_some());
        let mut queues = queues.into_iter().flatten();
        for ((remote, slot), device) in slots.into_iter().zip(devices) {
            let shared = self.shared.clone();
            shared.running.fetch_add(1, Ordering::SeqCst);
            let queues = queues.next().unwrap_or_default();
            remote.spawn(move || serve(device, queues, shared, slot));
        }
        Ok(())
    }

    /// Where it is mounted.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// Counts what is asked of the file.
    pub fn accounting(&self) -> &Arc<Accounting> {
        &self.shared.file.accounting
    }

    /// Whether requests come over io_uring.
    pub fn is_over_io_uring(&self) -> bool {
        self.has_queues.get()
    }

    /// What is requested as soon as somebody else has unmounted the file.
    pub fn unmounted(&self) -> Stop {
        self.shared.unmounted.clone()
    }

    /// Unmounts it. Everything that was begun on the device is complete on return, and nothing
    /// more will come; nothing is flushed. Must run inside a lane.
    pub async fn end(&self) {
        if self.shared.unmounted.is_requested() {
            self.mount.borrow_mut().is_gone();
        }
        self.mount.borrow_mut().end();
        self.shared.stop.request();
        while self.shared.running.load(Ordering::SeqCst) > 0 {
            let ended = self.shared.ended.listen();
            if self.shared.running.load(Ordering::SeqCst) > 0 {
                ended.await;
            }
        }
        end_lanes(&self.lanes).await;
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export")
            .field("mountpoint", &self.mountpoint)
            .finish_non_exhaustive()
    }
}

/// A session's life on its lane.
async fn serve(device: MessageDevice, queues: LaneQueues, shared: Arc<Shared>, slot: LaneSlot) {
    let session = Session::new(device, shared.file.clone());
    if session.run(queues, &shared.stop).await == End::Unmounted {
        shared.unmounted.request();
    }
    drop(slot);
    shared.running.fetch_sub(1, Ordering::SeqCst);
    shared.ended.notify(usize::MAX);
}

/// Descriptors of a mount: its own, and up to `count` in all.
fn devices(kernel: MessageDevice, count: usize) -> Vec<MessageDevice> {
    let mut devices = vec![kernel];
    while devices.len() < count {
        let cloned = clone::clone(devices[0].as_fd())
            .and_then(|descriptor| MessageDevice::new(descriptor, mount::DEVICE));
        // Fewer do as well.
        let Ok(device) = cloned else { break };
        devices.push(device);
    }
    devices
}

/// Whether requests are to come over io_uring, where the kernel has it switched on or not, or has none.
fn wants_queues(transport: Transport, is_switched_on: Option<bool>) -> bool {
    transport != Transport::Device && is_switched_on == Some(true)
}

/// How many lanes serve a mount.
fn lane_count(max_lanes: usize, wants_queues: bool) -> usize {
    let most = if wants_queues {
        usize::MAX
    } else {
        MOST_DEVICE_LANES
    };
    max_lanes.clamp(1, most)
}

/// The queues that there would be, for so many lanes; `None` where none are wanted or possible.
fn queues(transport: Transport, is_wanted: bool, lanes: usize) -> Result<Option<Vec<LaneQueues>>> {
    let queues = is_wanted.then(|| queue::deal_out(lanes)).flatten();
    match queues.is_none() && transport == Transport::IoUring {
        true => Err(no_queues()),
        false => Ok(queues),
    }
}

/// Lanes beside the calling one, for requests that come over queues or not.
fn lanes_for(count: usize, queues: Option<&[LaneQueues]>) -> Lanes {
    let mut options = LaneOptions::default();
    let most = queues.and_then(|queues| queues.iter().map(LaneQueues::entries).max());
    if let Some(entries) = most {
        options.commands = true;
        options.ring_entries += u32::try_from(entries).unwrap_or(0);
    }
    Lanes::with_options(count + 1, options)
}

/// Why requests cannot come over io_uring.
fn no_queues() -> Error {
    let text = match queue::is_switched_on() {
        Some(false) => format!(
            "FUSE over io_uring is switched off in the kernel: root switches it on with \
             'echo Y > {}'",
            queue::SWITCH
        ),
        Some(true) => "the kernel refuses the rings that FUSE over io_uring takes".to_owned(),
        None => "the kernel has no FUSE over io_uring, which came with Linux 6.14".to_owned(),
    };
    Error::new(ErrorKind::Unsupported, "mount", text)
}

/// Answers the kernel's greeting, which comes before everything else; whether requests come over
/// queues, if they may.
async fn greet(kernel: &MessageDevice, has_queues: bool) -> Result<bool> {
    let (buffers, len_bytes) = kernel.recv(session::receive_buffers()).await?;
    let (header, init) = greeting(&session::gather(&buffers, 0, len_bytes))?;
    let welcome = welcome(&init, has_queues);
    let body = welcome.encode();
    let reply = proto::reply_header(header.unique, 0, body.bytes().len());
    let reply = Buffer::copy_of(&[&reply, body.bytes()].concat());
    kernel.send(Buffers::from_iter([reply])).await?;
    Ok(welcome.flags2 & proto::INIT2_OVER_IO_URING != 0)
}

/// Decodes the kernel's greeting.
///
/// # Errors
/// If the message is no greeting, or of a version that is not supported.
fn greeting(message: &[u8]) -> Result<(Header, Init)> {
    let operation =
        Header::decode(message).map(|header| (header, header.operation(&message[HEADER_BYTES..])));
    let Some((header, Some(Operation::Init(init)))) = operation else {
        let text = "the kernel does not greet";
        return Err(Error::new(ErrorKind::Protocol, "mount", text));
    };
    if init.major != proto::VERSION.0 || init.minor < proto::MINOR_MIN {
        let text = format!(
            "the kernel's FUSE {}.{} is not supported",
            init.major, init.minor
        );
        return Err(Error::new(ErrorKind::Unsupported, "mount", text));
    }
    Ok((header, init))
}

fn welcome(init: &Init, has_queues: bool) -> Welcome {
    let mut flags2 = proto::INIT2_DIRECT_IO_ALLOW_MMAP;
    if has_queues {
        flags2 |= proto::INIT2_OVER_IO_URING;
    }
    let flags = proto::INIT_ASYNC_READ
        | proto::INIT_ATOMIC_O_TRUNC
        | proto::INIT_BIG_WRITES
        | proto::INIT_ASYNC_DIO
        | proto::INIT_MAX_PAGES
        | proto::INIT_EXT;
    Welcome {
        minor: init.minor.min(proto::VERSION.1),
        max_readahead_bytes: init.max_readahead_bytes,
        flags: flags & init.flags,
        flags2: flags2 & init.flags2,
        max_background: MAX_BACKGROUND,
        max_write_bytes: MAX_TRANSFER_BYTES as u32,
        max_pages: (MAX_TRANSFER_BYTES / 4096) as u16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_lanes_wait_at_the_device_and_one_for_each_processor_at_queues() {
        let counts = |wants_queues| [0, 1, 3, 64].map(|most| lane_count(most, wants_queues));
        assert_eq!(counts(false), [1, 1, 3, 4]);
        assert_eq!(counts(true), [1, 1, 3, 64]);
        assert!(wants_queues(Transport::Auto, Some(true)));
        assert!(!wants_queues(Transport::Auto, Some(false)));
        assert!(!wants_queues(Transport::IoUring, None));
        assert!(!wants_queues(Transport::Device, Some(true)));
    }
}

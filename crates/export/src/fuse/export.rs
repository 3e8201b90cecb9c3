//! A disk that is mounted: the lanes that serve it, from the mount to its end.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use event_listener::Event;
use vellum::BlockDevice;
use vellum_io::Result;
use vellum_io::lane::message::MessageDevice;
use vellum_io::lane::{self, LaneOptions};

use super::clone::clone;
use super::file::{File, Rights};
use super::greeting::greet;
use super::mount::{self, Mount};
use super::options::{ExportOptions, Transport};
use super::queue::{LaneQueues, deal_out, is_switched_on, no_queues};
use super::session::{End, Session};
use crate::accounting::Accounting;
use crate::nbd::Stop;
use crate::nbd::lanes::{LaneSlot, Lanes, end as end_lanes};

/// Threads that wait at `/dev/fuse` at most. The kernel wakes the one that has waited longest, so with more of
/// them each request of few readers comes to one whose processor has gone to sleep, and a lane serves many
/// requests at a time. Over io_uring each processor has a queue, and a lane of its own.
const MOST_DEVICE_LANES: usize = 4;

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
    /// [`ErrorKind::InvalidArgument`](vellum_io::ErrorKind::InvalidArgument) if `mountpoint` is no
    /// regular file; [`ErrorKind::Unsupported`](vellum_io::ErrorKind::Unsupported) where the kernel
    /// has no FUSE, or one that is too old; else what the system says, and what to do about it.
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
        let wants_queues = wants_queues(options.transport, is_switched_on());
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
        let cloned = clone(devices[0].as_fd())
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
    let queues = is_wanted.then(|| deal_out(lanes)).flatten();
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

//! [`Link`]: the place of a device in a graph, where another device can be put while
//! requests run.
//!
//! Whoever uses a device that may be exchanged (an export, an image above it, a job)
//! holds a link of its own to it. To exchange the device the links that lead to it are
//! drained: requests that run end, new ones wait; then all links are set, and go on.
//!
//! Invariants:
//! - A request goes to one device, whole, and is counted from before it is made until it
//!   has its result, whatever becomes of its [`Io`].
//! - While a link is drained none of its requests runs and none begins.
//! - Links that are drained at the same time lead to one device. The device below a link
//!   never waits for that link, so the drain of any number of them ends.
//! - Nobody else relies on what is below staying the same, but as a [`Shortcut`], which a
//!   drain ends: a link tells of no storage, and no place on the host (another device may own it a
//!   moment later).
//!
//! A request through a link takes a short lock twice. One that reads through the merged mapping of a
//! long chain (`qcow2/read/chain.rs`) passes all links of it, with two short locks more.
//!
//! [`Shortcut`]: shortcut::Shortcut

pub(crate) mod shortcut;

use std::any::Any;
use std::sync::{Arc, Weak};

use vellum_io::shared_memory::SharedBuffer;
use vellum_io::spawn;
use vellum_io::sync::{Event, Mutex, MutexGuard};
use vellum_storage::MemStorage;
use vellum_storage::mutants::{self, Mutant};

use self::shortcut::{PastLinks, Stretch};
use crate::Preallocation;
use crate::{
    BlockDevice, Buffer, DeviceInfo, DiskIdentity, Extent, Io, Raw, RawOptions, RequestFlags,
    Result, ZeroRequest,
};

/// A device that stands for another one, which can be exchanged.
#[derive(Debug)]
pub struct Link {
    core: Arc<Core>,
}

#[derive(Debug)]
struct Core {
    state: Mutex<State>,
    /// A request has ended, or the last drain has.
    changed: Event,
}

#[derive(Debug)]
struct State {
    target: Arc<dyn BlockDevice>,
    /// Requests that have begun and not ended.
    running: usize,
    /// How many drains hold requests up.
    drains: usize,
    /// Those that were found through this link, as long as they are of use or in use.
    shortcuts: Vec<(Weak<dyn PastLinks>, Stretch)>,
}

/// A request that is counted until this is dropped.
#[derive(Debug)]
struct Ticket(Arc<Core>);

/// Holds the requests of a link up until it is dropped.
#[derive(Debug)]
#[must_use = "requests go on when it is dropped"]
pub struct Drained(Arc<Core>);

impl Link {
    /// A link to `target`.
    pub fn new(target: Arc<dyn BlockDevice>) -> Arc<Self> {
        Arc::new(Link {
            core: Arc::new(Core {
                state: Mutex::new(State {
                    target,
                    running: 0,
                    drains: 0,
                    shortcuts: Vec::new(),
                }),
                changed: Event::new(),
            }),
        })
    }

    /// The device that requests go to now.
    pub fn target(&self) -> Arc<dyn BlockDevice> {
        self.core.lock().target.clone()
    }

    /// Holds new requests up, and waits until those that run have ended. Requests go on
    /// when the result is dropped; they are held up from the first poll on, and no more if
    /// the future is dropped.
    pub async fn drain(&self) -> Drained {
        self.core.lock().drains += 1;
        let drained = Drained(self.core.clone());
        // None is added while this holds requests up.
        let shortcuts = match mutants::is(Mutant::KeepShortcuts) {
            false => self.core.end_shortcuts(),
            true => Vec::new(),
        };
        if mutants::is(Mutant::DrainNothing) {
            return drained;
        }
        for passing in &shortcuts {
            shortcut::over(&**passing).await;
        }
        while self.core.lock().running > 0 {
            let changed = self.core.changed.listen();
            if self.core.lock().running > 0 {
                changed.await;
            }
        }
        drained
    }

    /// Notes a shortcut, which ends with the next drain; `false` if requests are held up, or
    /// the link does not lead to `target` any more.
    fn lead_past(
        &self,
        target: &Arc<dyn BlockDevice>,
        shortcut: Weak<dyn PastLinks>,
        stretch: Stretch,
    ) -> bool {
        let mut state = self.core.lock();
        if state.drains > 0 || !Arc::ptr_eq(&state.target, target) {
            return false;
        }
        // Whatever this holds for the last time is dropped outside the lock.
        let mut seen = Vec::with_capacity(state.shortcuts.len());
        state.shortcuts.retain(|(one, _)| {
            seen.extend(one.upgrade());
            one.strong_count() > 0 && seen.last().is_some_and(|last| !last.is_over())
        });
        state.shortcuts.push((shortcut, stretch));
        drop(state);
        true
    }

    /// Starts a request on the target: now, or when the link is not drained any more.
    fn start<T: 'static>(&self, begin: impl FnOnce(&dyn BlockDevice) -> Io<T> + 'static) -> Io<T> {
        let Some((target, ticket)) = Core::enter(&self.core) else {
            let core = self.core.clone();
            return Io::task(spawn(async move {
                let (target, _ticket) = Core::wait_and_enter(&core).await;
                begin(&*target).await
            }));
        };
        Self::count(begin(&*target), ticket)
    }

    /// As [`Link::start`], unless the link is drained or the target does not take the request.
    fn start_now<T: 'static>(
        &self,
        begin: impl FnOnce(&dyn BlockDevice) -> Option<Io<T>>,
    ) -> Option<Io<T>> {
        let (target, ticket) = Core::enter(&self.core)?;
        Some(Self::count(begin(&*target)?, ticket))
    }

    /// Counts a request until its end.
    fn count<T: 'static>(io: Io<T>, ticket: Ticket) -> Io<T> {
        if io.is_ready() {
            return io;
        }
        Io::start(async move {
            let _ticket = ticket;
            io.await
        })
    }
}

impl Core {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Ends all shortcuts, and tells of those whose requests pass the link. They stay noted: another
    /// drain waits for their requests too.
    fn end_shortcuts(&self) -> Vec<Arc<dyn PastLinks>> {
        let known = self.lock().shortcuts.clone();
        let mut passing = Vec::new();
        for (shortcut, stretch) in known {
            let Some(shortcut) = shortcut.upgrade() else {
                continue;
            };
            shortcut.end();
            if stretch == Stretch::Past {
                passing.push(shortcut);
            }
        }
        passing
    }

    /// Counts a request, unless requests are held up.
    fn enter(core: &Arc<Core>) -> Option<(Arc<dyn BlockDevice>, Ticket)> {
        let mut state = core.lock();
        if state.drains > 0 {
            return None;
        }
        state.running += 1;
        Some((state.target.clone(), Ticket(core.clone())))
    }

    async fn wait_and_enter(core: &Arc<Core>) -> (Arc<dyn BlockDevice>, Ticket) {
        loop {
            let changed = core.changed.listen();
            if let Some(entered) = Core::enter(core) {
                return entered;
            }
            changed.await;
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.running -= 1;
        let tell = state.running == 0 && state.drains > 0;
        drop(state);
        if tell {
            self.0.changed.notify(usize::MAX);
        }
    }
}

impl Drained {
    /// Puts another device in the place of the old one, which is returned.
    pub fn set(&self, target: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
        std::mem::replace(&mut self.0.lock().target, target)
    }
}

impl Drop for Drained {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.drains -= 1;
        let tell = state.drains == 0;
        drop(state);
        if tell {
            self.0.changed.notify(usize::MAX);
        }
    }
}

/// A device without a byte: what a link leads to while there is nothing for it.
///
/// # Errors
/// None that could come of an empty memory.
pub fn nothing() -> Result<Arc<dyn BlockDevice>> {
    let options = RawOptions {
        read_only: true,
        ..RawOptions::default()
    };
    let device = Raw::open(Arc::new(MemStorage::new()), options)?;
    Ok(device)
}

impl BlockDevice for Link {
    fn info(&self) -> DeviceInfo {
        self.target().info()
    }

    fn size_bytes(&self) -> u64 {
        self.target().size_bytes()
    }

    fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        self.start(move |device| device.read(offset_bytes, buffer))
    }

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        let flags = RequestFlags {
            fua: flags.fua && !mutants::is(Mutant::IgnoreFua),
        };
        self.start(move |device| device.write(offset_bytes, buffer, flags))
    }

    fn read_into(&self, offset_bytes: u64, into: &[SharedBuffer]) -> Option<Io<()>> {
        self.start_now(|device| device.read_into(offset_bytes, into))
    }

    fn write_from(
        &self,
        offset_bytes: u64,
        from: &[SharedBuffer],
        flags: RequestFlags,
    ) -> Option<Io<()>> {
        let flags = RequestFlags {
            fua: flags.fua && !mutants::is(Mutant::IgnoreFua),
        };
        self.start_now(|device| device.write_from(offset_bytes, from, flags))
    }

    fn write_compressed(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Io<Buffer> {
        self.start(move |device| device.write_compressed(offset_bytes, buffer, flags))
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        self.start(move |device| device.write_zeroes(offset_bytes, len_bytes, request))
    }

    fn copy_up(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.start(move |device| device.copy_up(offset_bytes, len_bytes))
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.start(move |device| device.discard(offset_bytes, len_bytes))
    }

    fn flush(&self) -> Io<()> {
        self.start(|device| device.flush())
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64, max_depth: u32) -> Io<Extent> {
        self.start(move |device| {
            let status = device.block_status(offset_bytes, len_bytes, max_depth);
            Io::start(async move {
                let mut extent = status.await?;
                extent.host = None;
                Ok(extent)
            })
        })
    }

    fn truncate(&self, size_bytes: u64) -> Io<()> {
        self.start(move |device| device.truncate(size_bytes))
    }

    fn resize(&self, size_bytes: u64, preallocation: Preallocation) -> Io<()> {
        self.start(move |device| device.resize(size_bytes, preallocation))
    }

    fn clear(&self) -> Io<()> {
        self.start(|device| device.clear())
    }

    fn close(&self) -> Io<()> {
        self.start(|device| device.close())
    }

    fn backing(&self) -> Option<Arc<dyn BlockDevice>> {
        self.target().backing()
    }

    fn stands_for(&self) -> Option<Arc<dyn BlockDevice>> {
        Some(self.target())
    }

    /// The link: what it leads to can be read past it only with a shortcut.
    fn transparent_device(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn identity(&self) -> Option<DiskIdentity> {
        self.target().identity()
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        self.target().allocated_bytes()
    }
}

#[cfg(all(test, shuttle))]
mod interleavings;

#[cfg(all(test, not(shuttle)))]
mod tests {
    use futures_util::FutureExt;
    use vellum_io::lane::{block_on, yield_now};

    use super::*;
    use crate::delegate;

    fn device(byte: u8) -> Arc<dyn BlockDevice> {
        let file = Arc::new(MemStorage::with_bytes(vec![byte; 4096]));
        Raw::open(file, RawOptions::default()).expect("a device")
    }

    async fn first_byte(link: &Link) -> u8 {
        link.read(0, Buffer::for_read(1)).await.expect("a byte")[0]
    }

    #[test]
    fn requests_wait_for_the_end_of_a_drain_and_meet_the_new_device() {
        block_on(async {
            let link = Link::new(device(1));
            assert_eq!(first_byte(&link).await, 1);
            let drained = link.drain().await;
            let again = link.drain().await;
            let read = link.read(0, Buffer::for_read(1));
            yield_now().await;
            assert!(!read.is_ready());
            drained.set(device(2));
            drop(drained);
            yield_now().await;
            assert!(!read.is_ready(), "the other drain holds it up");
            drop(again);
            assert_eq!(read.await.expect("a byte")[0], 2);
        });
    }

    /// A device whose reads end when they are told to.
    #[derive(Debug)]
    struct Slow(Arc<dyn BlockDevice>, Arc<Event>);
    impl BlockDevice for Slow {
        delegate!(
            0: info, size_bytes, write, write_zeroes, discard, flush, block_status, truncate, close,
        );
        fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
            let (device, go) = (self.0.clone(), self.1.listen());
            Io::task(spawn(async move {
                go.await;
                device.read(offset_bytes, buffer).await
            }))
        }
    }

    #[test]
    fn a_drain_waits_for_requests_whose_result_nobody_wants() {
        block_on(async {
            let go = Arc::new(Event::new());
            let link = Link::new(Arc::new(Slow(device(1), go.clone())));
            drop(link.read(0, Buffer::for_read(1)));
            let waiting = link.clone();
            let drained = spawn(async move { drop(waiting.drain().await) });
            for _ in 0..10 {
                yield_now().await;
            }
            assert_eq!(link.core.lock().running, 1);
            go.notify(usize::MAX);
            drained.await;
            assert_eq!(link.core.lock().running, 0);
        });
    }

    #[test]
    fn a_drain_that_is_given_up_holds_nobody_up() {
        block_on(async {
            let go = Arc::new(Event::new());
            let link = Link::new(Arc::new(Slow(device(1), go.clone())));
            let read = link.read(0, Buffer::for_read(1));
            assert!(link.drain().now_or_never().is_none());
            let second = link.read(0, Buffer::for_read(1));
            for _ in 0..10 {
                yield_now().await;
            }
            assert_eq!(link.core.lock().running, 2);
            go.notify(usize::MAX);
            assert_eq!(read.await.expect("a byte")[0], 1);
            assert_eq!(second.await.expect("a byte")[0], 1);
        });
    }
}

//! Model clients of an export. A request goes to whatever lane the seed says: connections
//! of real clients live on different lanes too, and those of one disk share its device.

use std::rc::Rc;
use std::sync::Arc;

use vellum::{BlockDevice, RequestFlags, ZeroRequest};
use vellum_io::{Buffer, Error, ErrorKind};

use super::guest_disk::GuestDisk;
use super::setup::Setup;
use crate::failure::{Failure, FailureKind};
use crate::model::{ChangeId, Effect};
use crate::pattern;

/// A disk is filled by so many bytes at least.
const FILL_BYTES: u64 = 16 << 10;

#[derive(Debug, Clone, Copy)]
enum Op {
    Write { offset: u64, len: u64, fua: bool },
    Zero { offset: u64, len: u64, unmap: bool },
    Discard { offset: u64, len: u64 },
    Read { offset: u64, len: u64 },
    Status { offset: u64, len: u64 },
    Flush,
}

/// Writes most of a disk once, in random order.
pub(super) async fn fill(setup: &Rc<Setup>, disk: &Rc<GuestDisk>) {
    let size = disk.model.borrow().size_bytes();
    let chunk = disk.cluster_size_bytes.max(FILL_BYTES);
    let mut offsets: Vec<u64> = (0..size).step_by(chunk as usize).collect();
    for at in (1..offsets.len()).rev() {
        offsets.swap(
            at,
            setup.draw_apart(|rng| rng.below(at as u64 + 1)) as usize,
        );
    }
    for offset in offsets {
        if setup.draw_apart(|rng| rng.chance(7, 8)) {
            let len = chunk.min(size - offset);
            let fua = false;
            perform(setup.clone(), disk.clone(), Op::Write { offset, len, fua }).await;
        }
    }
}

/// Makes requests, up to two at a time, until it has made enough of them.
pub(super) async fn client(setup: Rc<Setup>, disk: Rc<GuestDisk>, requests: u64) {
    let mut before = None;
    for _ in 0..requests {
        if setup.failure().is_some() {
            break;
        }
        let op = draw(&setup, &disk);
        let job = perform(setup.clone(), disk.clone(), op);
        let running = setup.lanes.any().spawn(job);
        let pipelined = setup.draw(|rng| rng.chance(1, 2));
        if let Some(before) = before.replace(running) {
            let () = before.await;
        }
        if !pipelined && let Some(running) = before.take() {
            running.await;
        }
    }
    if let Some(before) = before {
        before.await;
    }
    disk.clients.set(disk.clients.get() - 1);
    disk.changed.notify(usize::MAX);
}

fn draw(setup: &Setup, disk: &GuestDisk) -> Op {
    let size = disk.model.borrow().least_size_bytes();
    setup.draw(|rng| {
        let cluster = disk.cluster_size_bytes;
        // A few clusters are everybody's; of the others each client finds some alone.
        let hot = rng.chance(1, 2);
        let span = if hot { size.min(4 * cluster) } else { size };
        let longest = [512, 4096, cluster, 3 * cluster][rng.below(4) as usize];
        let len = match rng.chance(3, 4) {
            true => 512 * rng.between(1, longest.div_ceil(512)),
            false => rng.between(1, longest),
        };
        let len = len.min(span);
        let mut offset = rng.below(span - len + 1);
        if rng.chance(3, 4) {
            offset -= offset % 512;
        }
        match rng.below(20) {
            0..=8 => Op::Write {
                offset,
                len,
                fua: rng.chance(1, 6),
            },
            9 => Op::Zero {
                offset,
                len,
                unmap: rng.chance(1, 2),
            },
            // Whole clusters are given back, and used again.
            10 | 11 if rng.chance(1, 2) => whole_clusters(offset, len, cluster, size),
            11 => Op::Discard { offset, len },
            10 => Op::Zero {
                offset,
                len,
                unmap: true,
            },
            12 => Op::Status { offset, len },
            13..=16 => Op::Read { offset, len },
            _ => Op::Flush,
        }
    })
}

/// Discards the clusters that a range touches.
fn whole_clusters(offset: u64, len: u64, cluster: u64, size: u64) -> Op {
    let start = offset - offset % cluster;
    let end = (offset + len).next_multiple_of(cluster).min(size);
    Op::Discard {
        offset: start,
        len: end - start,
    }
}

/// Counts a request until it is dropped.
struct Running(Rc<GuestDisk>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.set(self.0.running.get() - 1);
        self.0.changed.notify(usize::MAX);
    }
}

/// Waits for the disk's export; `None` if there will be none.
async fn enter(disk: &Rc<GuestDisk>) -> Option<(Arc<dyn BlockDevice>, Running)> {
    disk.until(|disk| disk.device.borrow().is_some() || disk.is_gone())
        .await;
    let device = disk.device.borrow().clone()?;
    disk.running.set(disk.running.get() + 1);
    Some((device, Running(disk.clone())))
}

async fn perform(setup: Rc<Setup>, disk: Rc<GuestDisk>, op: Op) {
    let Some((device, _running)) = enter(&disk).await else {
        return;
    };
    if let Err(failure) = try_perform(&setup, &disk, &*device, op).await {
        setup.fail(failure);
    }
}

/// Ends a change in the model. One that failed may have had an effect.
fn end(
    setup: &Setup,
    disk: &GuestDisk,
    op: Op,
    ticket: ChangeId,
    result: Result<(), Error>,
) -> Result<(), Failure> {
    let fua = matches!(op, Op::Write { fua: true, .. });
    match result {
        Ok(()) => disk.model.borrow_mut().end(ticket, fua),
        Err(error) => {
            disk.model.borrow_mut().abandon(ticket);
            refused(setup, disk, op, &error)?;
        }
    }
    Ok(())
}

/// Lets errors pass where requests to the disk fail, or the export goes.
fn refused(setup: &Setup, disk: &GuestDisk, op: Op, error: &Error) -> Result<(), Failure> {
    if setup.faulty && !setup.fills || disk.hung_up_on.get() {
        setup.note(format!("{op:?} failed: {error}"));
        return Ok(());
    }
    let kind = match error.kind() {
        ErrorKind::NoSpace => FailureKind::NoSpace,
        _ => FailureKind::Request,
    };
    Err(Failure::error(kind, op, error))
}

async fn try_perform(
    setup: &Setup,
    disk: &GuestDisk,
    device: &dyn BlockDevice,
    op: Op,
) -> Result<(), Failure> {
    match op {
        Op::Write { offset, len, fua } => {
            let mut buffer = Buffer::zeroed(len as usize);
            let id = disk.model.borrow_mut().new_write();
            pattern::fill(id, offset, &mut buffer);
            let ticket = begin(disk, Effect::Write(id), offset, len);
            let written = device
                .write(offset, buffer, RequestFlags::default().fua(fua))
                .await;
            end(setup, disk, op, ticket, written.map(drop))
        }
        Op::Zero { offset, len, unmap } => {
            let ticket = begin(disk, Effect::Zeroes, offset, len);
            let request = ZeroRequest::default()
                .may_unmap(unmap)
                .fua(false)
                .no_fallback(false);
            let zeroed = device.write_zeroes(offset, len, request).await;
            end(setup, disk, op, ticket, zeroed)
        }
        Op::Discard { offset, len } => {
            let ticket = begin(disk, Effect::Discard, offset, len);
            let discarded = device.discard(offset, len).await;
            end(setup, disk, op, ticket, discarded)
        }
        Op::Read { offset, len } => {
            let begun = disk.model.borrow_mut().begin_watch();
            let mut buffer = Buffer::zeroed(len as usize);
            buffer.fill(0xcc);
            match device.read(offset, buffer).await {
                Ok(buffer) => {
                    let mut model = disk.model.borrow_mut();
                    model.end_read(begun, offset, &buffer)?;
                }
                Err(error) => refused(setup, disk, op, &error)?,
            }
            Ok(())
        }
        Op::Status { offset, len } => match device.block_status(offset, len, u32::MAX).await {
            Ok(_) => Ok(()),
            Err(error) => refused(setup, disk, op, &error),
        },
        Op::Flush => {
            let begun = disk.model.borrow_mut().begin_watch();
            match device.flush().await {
                Ok(()) => disk.model.borrow_mut().end_flush(begun),
                Err(error) => refused(setup, disk, op, &error)?,
            }
            Ok(())
        }
    }
}

fn begin(disk: &GuestDisk, effect: Effect, offset: u64, len: u64) -> ChangeId {
    let mut model = disk.model.borrow_mut();
    model.begin(effect, offset..offset + len)
}

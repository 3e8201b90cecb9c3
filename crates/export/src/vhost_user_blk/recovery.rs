//! From one server to the next: the memory that a client keeps for them.
//!
//! Invariant: before anything is carried out for a client, what was acknowledged to it and not
//! flushed is in the device again, durably.

use std::os::fd::OwnedFd;

use vellum::{RequestFlags, ZeroRequest};
use vellum_io::Result;

use super::disk::Disk;
use super::in_flight::InFlight;
use super::message::{InFlightArea, broken};
use super::session::MAX_QUEUE_SIZE;
use super::unflushed::Change;

/// New memory, as a client asks for it; an export has so many `queues`.
///
/// # Errors
/// If it asks for none, or for more than there can be; what the system says if there is no memory.
pub(super) fn make(
    disk: &Disk,
    queues: u16,
    wanted: &InFlightArea,
) -> Result<(InFlightArea, OwnedFd)> {
    let (count, size) = (wanted.queues, wanted.queue_size);
    if count == 0 || count > queues || size == 0 || size > MAX_QUEUE_SIZE {
        return Err(broken(format!(
            "memory for the requests in flight of {count} queues of {size}"
        )));
    }
    InFlight::create(count, size, disk.keeps_writes)
}

/// Takes memory over. What a server before this one has acknowledged and not flushed is written
/// again.
///
/// # Errors
/// If the memory is damaged, or the device cannot be written.
pub(super) async fn take_over(disk: &Disk, area: &InFlightArea, file: OwnedFd) -> Result<InFlight> {
    let in_flight = InFlight::map(area, file)?;
    if in_flight.writes_through()? {
        disk.set_write_back(false);
    }
    let Some(unflushed) = &in_flight.unflushed else {
        return Ok(in_flight);
    };
    // What this server has acknowledged it still has.
    if unflushed.owner() == disk.server || disk.geometry().read_only {
        return Ok(in_flight);
    }
    let size_bytes = disk.device.size_bytes();
    let write = async |offset_bytes, change| match within(size_bytes, offset_bytes, change) {
        None => Ok(()),
        Some(Change::Data(data)) => {
            let flags = RequestFlags::default();
            disk.device.write(offset_bytes, data, flags).await.map(drop)
        }
        Some(Change::Zeroes(len_bytes, unmap)) => {
            let request = ZeroRequest::default().may_unmap(unmap);
            disk.device
                .write_zeroes(offset_bytes, len_bytes, request)
                .await
        }
    };
    unflushed.replay(&in_flight.logs()?, write).await?;
    let covered = unflushed.begin_flush();
    disk.device.flush().await?;
    unflushed.end_flush(covered);
    unflushed.own(disk.server);
    Ok(in_flight)
}

/// What of a change lies on a disk of this size: it may have become shorter since.
fn within(size_bytes: u64, offset_bytes: u64, change: Change) -> Option<Change> {
    let left_bytes = size_bytes.checked_sub(offset_bytes)?;
    match change {
        _ if left_bytes == 0 => None,
        Change::Data(mut data) => {
            data.truncate(usize::try_from(left_bytes).unwrap_or(usize::MAX));
            Some(Change::Data(data))
        }
        Change::Zeroes(len_bytes, unmap) => Some(Change::Zeroes(len_bytes.min(left_bytes), unmap)),
    }
}

//! From one server to the next: the memory that a client keeps for them.
//!
//! Invariant: before anything is carried out for a client, what was acknowledged to it and not
//! flushed is in the device again, durably, unless other exports have changed it since.

use std::ops::Range;
use std::os::fd::OwnedFd;

use vellum::{RequestFlags, ZeroRequest};
use vellum_io::{Buffer, Result, lane};

use super::disk::Disk;
use super::in_flight::InFlight;
use super::message::{InFlightArea, broken};
use super::ring::MAX_QUEUE_SIZE;
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
/// If the memory is damaged, the device cannot be written, or it `is_over` first: what is left is
/// written by whoever comes next.
pub(super) async fn take_over(
    disk: &Disk,
    area: &InFlightArea,
    file: OwnedFd,
    is_over: impl Fn() -> bool,
) -> Result<InFlight> {
    let in_flight = InFlight::map(area, file)?;
    if in_flight.writes_through()? {
        disk.set_write_back(false);
    }
    let Some(unflushed) = &in_flight.unflushed else {
        return Ok(in_flight);
    };
    // What this server has acknowledged it still has.
    if unflushed.owner() == disk.server {
        return Ok(in_flight);
    }
    if disk.geometry().read_only {
        // A flush would say of what only this memory has that it is on the disk.
        return match unflushed.has_records(&in_flight.logs()?) {
            false => Ok(in_flight),
            true => Err(broken(
                "the guest has written what is not on the disk yet, and this export cannot write it: \
                 have it writable",
            )),
        };
    }
    let size_bytes = disk.device.size_bytes();
    let write = async |offset_bytes, change| {
        if is_over() {
            return Err(broken("nobody waits for what was not flushed"));
        }
        lane::yield_now().await;
        write_again(disk, size_bytes, offset_bytes, change).await
    };
    unflushed.replay(&in_flight.logs()?, write).await?;
    unflushed.flush(&*disk.device).await?;
    unflushed.own(disk.server);
    Ok(in_flight)
}

async fn write_again(
    disk: &Disk,
    size_bytes: u64,
    offset_bytes: u64,
    change: Change,
) -> Result<()> {
    let Some(change) = within(size_bytes, offset_bytes, change) else {
        return Ok(());
    };
    let len_bytes = match &change {
        Change::Data(data) => data.len() as u64,
        Change::Zeroes(len_bytes, _) => *len_bytes,
    };
    let all = offset_bytes..offset_bytes + len_bytes;
    let changes = disk.kept.overtaken.stop_changes().await;
    for part in changes.parts_left(all.clone()) {
        write_part(disk, &all, part, &change).await?;
    }
    Ok(())
}

/// Writes a part of a change that reaches over `all`.
async fn write_part(
    disk: &Disk,
    all: &Range<u64>,
    part: Range<u64>,
    change: &Change,
) -> Result<()> {
    let device = &disk.device;
    match change {
        Change::Data(data) => {
            let within = (part.start - all.start) as usize..(part.end - all.start) as usize;
            let data = Buffer::copy_of(&data[within]);
            let written = device.write(part.start, data, RequestFlags::default());
            written.await.map(drop)
        }
        Change::Zeroes(_, unmap) => {
            let request = ZeroRequest::default().may_unmap(*unmap);
            let len_bytes = part.end - part.start;
            device.write_zeroes(part.start, len_bytes, request).await
        }
    }
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use vellum::{Raw, RawOptions};
    use vellum_io::Buffer;
    use vellum_storage::MemStorage;

    use super::super::Options;
    use super::*;
    use crate::unflushed_logs::UnflushedLogs;

    fn disk(read_only: bool) -> Disk {
        let file = Arc::new(MemStorage::with_bytes(vec![1; 4096]));
        let raw = Raw::open(file, RawOptions::default()).expect("a device");
        let options = Options {
            read_only,
            ..Options::default()
        };
        Disk::new(raw, &options, None)
    }

    /// Memory in which a server has left records.
    fn left_behind() -> (InFlightArea, OwnedFd) {
        let wanted = InFlightArea {
            len_bytes: 0,
            offset_bytes: 0,
            queues: 1,
            queue_size: 64,
        };
        let (area, file) = make(&disk(false), 1, &wanted).expect("memory");
        let in_flight = InFlight::map(&area, &file).expect("mapped");
        let all = in_flight.unflushed.as_ref().expect("logs");
        all.own(7);
        let mut log = in_flight.log(0).expect("a log");
        for at in 0..8 {
            assert!(log.append_zeroes(all, 512 * at, 512, false));
        }
        (area, file)
    }

    async fn sum_of(disk: &Disk) -> u64 {
        let read = disk.device.read(0, Buffer::for_read(4096)).await;
        let held = read.expect("read");
        held.iter().map(|&byte| u64::from(byte)).sum()
    }

    #[test]
    fn what_nobody_waits_for_any_more_is_left_to_the_next_server() {
        let (area, file) = left_behind();
        lane::block_on(async {
            let (disk, asked) = (disk(false), Cell::new(0));
            let is_over = || asked.replace(asked.get() + 1) == 3;
            let again = file.try_clone().expect("a descriptor");
            let given_up = take_over(&disk, &area, again, is_over).await;
            assert!(given_up.is_err());
            assert_eq!(sum_of(&disk).await, 5 * 512, "three were written");
            let taken = take_over(&disk, &area, file, || false).await;
            assert!(taken.is_ok());
            assert_eq!(sum_of(&disk).await, 0);
        });
    }

    /// Another client has come back sooner: what it writes is newer than the log.
    #[test]
    fn what_other_exports_have_changed_since_is_not_written_over() {
        let (area, file) = left_behind();
        lane::block_on(async {
            let logs = UnflushedLogs::default();
            let file_bytes = Arc::new(MemStorage::with_bytes(vec![1; 4096]));
            let raw = Raw::open(file_bytes, RawOptions::default()).expect("a device");
            let options = Options {
                read_only: false,
                logs: logs.clone(),
                ..Options::default()
            };
            let disk = Disk::new(raw.clone(), &options, None);
            let other = logs.flushed_with(raw);
            let written = other.write(700, Buffer::copy_of(&[2; 100]), RequestFlags::default());
            written.await.expect("written");
            let taken = take_over(&disk, &area, file, || false).await;
            assert!(taken.is_ok());
            let held = disk.device.read(0, Buffer::for_read(4096)).await;
            let mut expected = vec![0; 4096];
            expected[700..800].fill(2);
            assert!(held.expect("read")[..] == expected);
        });
    }

    #[test]
    fn an_export_that_cannot_write_it_leaves_what_was_not_flushed_to_another() {
        let (area, file) = left_behind();
        lane::block_on(async {
            let again = || file.try_clone().expect("a descriptor");
            let refused = take_over(&disk(true), &area, again(), || false).await;
            let refused = refused.expect_err("it would be lost");
            assert!(refused.message().contains("have it writable"), "{refused}");
            let writable = disk(false);
            let taken = take_over(&writable, &area, again(), || false).await;
            assert!(taken.is_ok());
            assert_eq!(sum_of(&writable).await, 0);
            let taken = take_over(&disk(true), &area, again(), || false).await;
            assert!(taken.is_ok(), "nothing is left");
        });
    }
}

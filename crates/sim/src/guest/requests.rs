//! The requests of a guest. The model is told when each begins, and how it ends.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use vellum::{BlockDevice, Error, ErrorKind, RequestFlags, ZeroRequest};
use vellum_io::Buffer;

use super::Guest;
use crate::failure::{Failure, FailureKind};
use crate::model::{ChangeId, Effect, Model};
use crate::pattern;
use crate::scenario::Op;
use crate::space::ledger::Entry;

/// Ends a change in the model; one that shrinking overtook may have had an effect.
fn end_change(
    guest: &Guest,
    op: Op,
    (ticket, entry): (ChangeId, Option<Entry>),
    result: Result<(), Error>,
    fua: bool,
) -> Result<(), Failure> {
    let lacks_room = guest.end_entry(op, entry, result.as_ref().err())?;
    let mut model = guest.model.borrow_mut();
    match result {
        Ok(()) => model.end(ticket, fua),
        Err(_) if lacks_room => model.abandon(ticket),
        Err(error) if guest.excuses(&error) => model.abandon(ticket),
        Err(error) if is_overtaken(&model, op, &error) => model.abandon(ticket),
        Err(error) => return Err(Failure::error(FailureKind::Request, op, &error)),
    }
    Ok(())
}

fn is_overtaken(model: &Model, op: Op, error: &Error) -> bool {
    let (offset, len) = op.range();
    let end = offset + len;
    // A part of a cluster can be compressed only where the device ends with it.
    let was_the_end = matches!(op, Op::WriteCompressed { .. })
        && error.kind() == ErrorKind::InvalidArgument
        && (model.is_resizing() || model.size_bytes() != end);
    was_the_end || (error.kind() == ErrorKind::OutOfRange && end > model.least_size_bytes())
}

/// Does one request and tells the model when it begins and ends.
pub(crate) async fn perform(
    guest: Rc<Guest>,
    device: Arc<dyn BlockDevice>,
    op: Op,
) -> Result<(), Failure> {
    let entry = guest.begin_entry(op);
    match op {
        Op::Write { offset, len, fua } | Op::WriteCompressed { offset, len, fua } => {
            let mut buffer = Buffer::zeroed(len as usize);
            let id = guest.model.borrow_mut().new_write();
            pattern::fill(id, offset, &mut buffer);
            let ticket = guest
                .model
                .borrow_mut()
                .begin(Effect::Write(id), offset..offset + len);
            let flags = RequestFlags::default().fua(fua);
            let written = match op {
                Op::WriteCompressed { .. } => device.write_compressed(offset, buffer, flags),
                _ => device.write(offset, buffer, flags),
            };
            end_change(&guest, op, (ticket, entry), written.await.map(drop), fua)?;
        }
        Op::WriteZeroes {
            offset,
            len,
            unmap,
            fua,
        } => {
            let ticket = guest
                .model
                .borrow_mut()
                .begin(Effect::Zeroes, offset..offset + len);
            let request = ZeroRequest::default()
                .may_unmap(unmap)
                .fua(fua)
                .no_fallback(false);
            let zeroed = device.write_zeroes(offset, len, request).await;
            end_change(&guest, op, (ticket, entry), zeroed, fua)?;
        }
        Op::Discard { offset, len } => {
            let ticket = guest
                .model
                .borrow_mut()
                .begin(Effect::Discard, offset..offset + len);
            let discarded = device.discard(offset, len).await;
            end_change(&guest, op, (ticket, entry), discarded, false)?;
        }
        Op::Read { offset, len } => read(&guest, &*device, op, offset..offset + len).await?,
        Op::Flush => flush(&guest, &*device, entry).await?,
    }
    Ok(())
}

async fn read(
    guest: &Guest,
    device: &dyn BlockDevice,
    op: Op,
    range: Range<u64>,
) -> Result<(), Failure> {
    let begun = guest.model.borrow_mut().begin_watch();
    let mut buffer = Buffer::zeroed((range.end - range.start) as usize);
    buffer.fill(0xcc);
    match device.read(range.start, buffer).await {
        Ok(buffer) => Ok(guest
            .model
            .borrow_mut()
            .end_read(begun, range.start, &buffer)?),
        Err(error) if guest.excuses(&error) => Ok(()),
        Err(error) if is_overtaken(&guest.model.borrow(), op, &error) => Ok(()),
        Err(error) => Err(Failure::error(FailureKind::Request, op, &error)),
    }
}

async fn flush(
    guest: &Guest,
    device: &dyn BlockDevice,
    entry: Option<Entry>,
) -> Result<(), Failure> {
    let begun = guest.model.borrow_mut().begin_watch();
    let lost = guest.plugged.disk.any_flush_failed();
    match device.flush().await {
        Ok(()) if lost => {
            let message = "a flush has succeeded after one of the disk that failed";
            Err(Failure::new(FailureKind::Request, message))
        }
        Ok(()) => {
            guest.note_flushed(begun, entry);
            guest.model.borrow_mut().end_flush(begun);
            guest.unsettled.set(false);
            Ok(())
        }
        Err(error) if guest.end_entry(Op::Flush, entry, Some(&error))? => Ok(()),
        Err(error) if guest.excuses(&error) => Ok(()),
        Err(error) => Err(Failure::error(FailureKind::Request, Op::Flush, &error)),
    }
}

//! The guest: does the steps of a leg, and tells the model.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use vellum::{BlockDevice, RequestFlags, ZeroRequest};
use vellum_storage::{Buffer, JoinHandle, spawn};

use crate::failure::{Failure, FailureKind};
use crate::machine::Plugged;
use crate::model::{Effect, Model};
use crate::pattern;
use crate::scenario::{ImageOptions, Op, Step};
use crate::subject::Subject;

/// How many requests a guest has in flight at most.
const MAX_IN_FLIGHT: usize = 6;

/// Everything that the guest's tasks share.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) subject: Arc<dyn Subject>,
    pub(crate) options: ImageOptions,
    pub(crate) plugged: Plugged,
    pub(crate) model: RefCell<Model>,
}

type Running = VecDeque<JoinHandle<Result<(), Failure>>>;

/// Opens the image, does all steps and waits for the last of them.
pub(crate) async fn drive(guest: Rc<Guest>, steps: Vec<Step>) -> Result<(), Failure> {
    let mut device = guest.plugged.open(&*guest.subject, &guest.options).await?;
    let mut running = Running::new();
    for step in steps {
        match step {
            Step::Start(op) => {
                while running.len() >= MAX_IN_FLIGHT {
                    finish_one(&mut running).await?;
                }
                running.push_back(spawn(perform(guest.clone(), device.clone(), op)));
            }
            Step::Wait => while finish_one(&mut running).await? {},
            Step::Reopen => {
                while finish_one(&mut running).await? {}
                close(&guest, &*device).await?;
                device = guest.plugged.open(&*guest.subject, &guest.options).await?;
            }
        }
    }
    while finish_one(&mut running).await? {}
    Ok(())
}

/// Closes a device; a close makes everything durable, as a flush does.
pub(crate) async fn close(guest: &Guest, device: &dyn BlockDevice) -> Result<(), Failure> {
    let begun = guest.model.borrow_mut().begin_watch();
    device
        .close()
        .await
        .map_err(|error| Failure::error(FailureKind::Request, "close", &error))?;
    guest.model.borrow_mut().end_flush(begun);
    Ok(())
}

async fn finish_one(running: &mut Running) -> Result<bool, Failure> {
    match running.pop_front() {
        Some(task) => task.await.map(|()| true),
        None => Ok(false),
    }
}

/// Does one request and tells the model when it begins and ends.
pub(crate) async fn perform(
    guest: Rc<Guest>,
    device: Arc<dyn BlockDevice>,
    op: Op,
) -> Result<(), Failure> {
    let failed = |error| Failure::error(FailureKind::Request, op, &error);
    match op {
        Op::Write { offset, len, fua } => {
            let mut buffer = Buffer::zeroed(len as usize);
            let id = guest.model.borrow_mut().new_write();
            pattern::fill(id, offset, &mut buffer);
            let ticket = guest
                .model
                .borrow_mut()
                .begin(Effect::Write(id), offset..offset + len);
            device
                .write(offset, buffer, RequestFlags { fua })
                .await
                .map_err(failed)?;
            guest.model.borrow_mut().end(ticket, fua);
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
            let request = ZeroRequest {
                may_unmap: unmap,
                fua,
                no_fallback: false,
            };
            device
                .write_zeroes(offset, len, request)
                .await
                .map_err(failed)?;
            guest.model.borrow_mut().end(ticket, fua);
        }
        Op::Discard { offset, len } => {
            let ticket = guest
                .model
                .borrow_mut()
                .begin(Effect::Discard, offset..offset + len);
            device.discard(offset, len).await.map_err(failed)?;
            guest.model.borrow_mut().end(ticket, false);
        }
        Op::Read { offset, len } => {
            let begun = guest.model.borrow_mut().begin_watch();
            let mut buffer = Buffer::zeroed(len as usize);
            buffer.fill(0xcc);
            let buffer = device.read(offset, buffer).await.map_err(failed)?;
            guest.model.borrow_mut().end_read(begun, offset, &buffer)?;
        }
        Op::Flush => {
            let begun = guest.model.borrow_mut().begin_watch();
            device.flush().await.map_err(failed)?;
            guest.model.borrow_mut().end_flush(begun);
        }
    }
    Ok(())
}

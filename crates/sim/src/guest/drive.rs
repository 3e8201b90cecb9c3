//! The steps of a cycle, one after the other, from the open of the image to its close.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use vellum::Preallocation;
use vellum::qcow2::AsQcow2;
use vellum::qcow2::Qcow2;
use vellum::qcow2::amend::AmendOptions;
use vellum::{BlockDevice, Error, ErrorKind};
use vellum_io::{JoinHandle, spawn};

use super::close::{close, close_failing};
use super::examine::{Depth, examine};
use super::requests::perform;
use super::{Guest, bitmaps, chain, damage, keys, snapshots};
use crate::failure::{Failure, FailureKind};
use crate::faults::Faults;
use crate::model::{ChangeId, Effect, MAX_RUNNING};
use crate::scenario::{Amendment, Change, DataFile, FaultRates, Step};

/// How many requests a guest has in flight at most.
const MAX_IN_FLIGHT: usize = 6;

type Running = VecDeque<JoinHandle<Result<(), Failure>>>;

/// Opens the image, does all steps, waits for the last of them and closes the image.
pub(crate) async fn drive(guest: Rc<Guest>, steps: Vec<Step>) -> Result<(), Failure> {
    let mut device = guest.plugged.open(&*guest.engine, &guest.options).await?;
    let mut running = Running::new();
    let mut most = MAX_IN_FLIGHT;
    for step in steps {
        if guest.failing.get() && is_change(&step) {
            while finish_one(&mut running).await? {}
        }
        if guest.has_failed_change(&step) || guest.astray.get() && step != Step::Reopen {
            continue;
        }
        match step {
            Step::Start(op) => {
                while running.len() >= most {
                    finish_one(&mut running).await?;
                }
                // Beyond the end, or what may be it soon, there is nothing to ask for.
                let (offset, len) = op.range();
                if offset + len <= guest.model.borrow().least_size_bytes() {
                    running.push_back(spawn(perform(guest.clone(), device.clone(), op)));
                }
            }
            Step::Wait => while finish_one(&mut running).await? {},
            Step::InFlight(requests) => most = requests.clamp(1, MAX_RUNNING as u64 / 2) as usize,
            Step::SetQuota { blocks } => guest.set_quota(blocks),
            Step::Fail { seed, odds } => start_failing(&guest, seed, odds),
            Step::Reopen
            | Step::Commit
            | Step::Flatten { .. }
            | Step::Repair(_)
            | Step::Amend(_) => {
                while finish_one(&mut running).await? {}
                device = open_anew(&guest, device, step).await?;
            }
            Step::Resize {
                size_bytes,
                preallocation,
            } => {
                let size = (size_bytes, preallocation);
                start_resize(&guest, &device, &mut running, size).await?;
            }
            Step::ChangeKeys => running.push_back(spawn(keys::change(device.clone()))),
            Step::Compact => running.push_back(spawn(compact(guest.clone(), device.clone()))),
            Step::Snapshot(change) => {
                start_snapshot_change(&guest, &device, &mut running, change).await?;
            }
            Step::Bitmap(change) => {
                while changes_at_once(&guest) && finish_one(&mut running).await? {}
                guest.model.borrow_mut().begin_bitmap_change(change);
                let (guest, device) = (guest.clone(), device.clone());
                running.push_back(spawn(bitmaps::change(guest, device, change)));
            }
        }
    }
    while finish_one(&mut running).await? {}
    if guest.failing.get() {
        close_failing(&guest, &*device).await;
        return Ok(());
    }
    close(&guest, &*device).await
}

fn is_change(step: &Step) -> bool {
    matches!(
        step,
        Step::Resize { .. } | Step::Snapshot(_) | Step::Bitmap(_)
    )
}

/// Has requests on the disk fail from now on.
fn start_failing(guest: &Guest, seed: u64, odds: FaultRates) {
    guest.failing.set(true);
    let faults = Faults {
        requests_one_in: odds.requests,
        flushes_one_in: odds.flushes,
        forgets: odds.forgets,
        ..Faults::new(seed)
    };
    drop(guest.plugged.disk.set_faults(Some(faults)));
}

/// Closes the image, does what is done to one that is closed, and opens it again.
async fn open_anew(
    guest: &Guest,
    device: Arc<dyn BlockDevice>,
    step: Step,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    match step {
        Step::Amend(amendment) => amend(guest, &*device, amendment).await?,
        _ if guest.failing.get() => return reopen_failing(guest, device).await,
        _ => close(guest, &*device).await?,
    }
    drop(device);
    if matches!(step, Step::Commit | Step::Flatten { .. }) {
        guest.model.borrow_mut().blur_snapshots();
    }
    match step {
        Step::Flatten { compress } => chain::flatten(guest, compress).await?,
        Step::Commit => chain::commit(guest).await?,
        Step::Repair(damage) => damage::break_and_repair(guest, damage).await?,
        _ => {}
    }
    guest.plugged.open(&*guest.engine, &guest.options).await
}

/// Starts changing the snapshots, alone or beside the requests that run.
async fn start_snapshot_change(
    guest: &Rc<Guest>,
    device: &Arc<dyn BlockDevice>,
    running: &mut Running,
    change: Change,
) -> Result<(), Failure> {
    let alone = snapshots::runs_alone(&guest.model.borrow(), change);
    if alone {
        while finish_one(running).await? {}
    }
    let begun = snapshots::begin(guest, &**device, change);
    let change = begun.map(|begun| snapshots::change(guest.clone(), device.clone(), begun));
    match change {
        Some(change) if alone => change.await?,
        Some(change) => running.push_back(spawn(change)),
        None => {}
    }
    Ok(())
}

/// Starts changing the size, beside the requests that run where the model allows it.
async fn start_resize(
    guest: &Rc<Guest>,
    device: &Arc<dyn BlockDevice>,
    running: &mut Running,
    (size_bytes, preallocation): (u64, Preallocation),
) -> Result<(), Failure> {
    if guest.model.borrow().is_changing_snapshots() {
        while finish_one(running).await? {}
    }
    // Requests that run are met by shrinking only: growth may let in again what
    // shrinking refused.
    let now = guest.model.borrow().least_size_bytes();
    if size_bytes >= now || changes_at_once(guest) {
        while finish_one(running).await? {}
    }
    let given_up = begin_resize(guest, size_bytes);
    let (guest, device) = (guest.clone(), device.clone());
    let resizing = async move {
        let resized = resize(guest.clone(), device, size_bytes, preallocation).await;
        if let Some(given_up) = given_up {
            guest.model.borrow_mut().abandon(given_up);
        }
        resized
    };
    running.push_back(spawn(resizing));
    Ok(())
}

/// Begins a resize in the model. What a raw data file gives up may be gone before the size has changed.
fn begin_resize(guest: &Guest, size_bytes: u64) -> Option<ChangeId> {
    let mut model = guest.model.borrow_mut();
    let given_up = size_bytes..model.size_bytes();
    let is_raw = guest.options.data_file == DataFile::ExternalRaw;
    let given_up = (is_raw && !given_up.is_empty()).then(|| model.begin(Effect::Discard, given_up));
    model.begin_resize(size_bytes);
    given_up
}

/// Whether a resize or a change of bitmaps runs: the model knows one at a time.
fn changes_at_once(guest: &Guest) -> bool {
    let model = guest.model.borrow();
    model.is_resizing() || model.is_changing_bitmaps()
}

/// Resizes the device. What an image or its disk does not allow changes nothing.
async fn resize(
    guest: Rc<Guest>,
    device: Arc<dyn BlockDevice>,
    size_bytes: u64,
    preallocation: Preallocation,
) -> Result<(), Failure> {
    let old_bytes = guest.model.borrow().size_bytes();
    let preallocation = match size_bytes < old_bytes {
        true => Preallocation::Off,
        false => preallocation,
    };
    let resized = device.resize(size_bytes, preallocation).await;
    let is_old = |image: &Qcow2| image.header().version < 3;
    let refusable = device.as_qcow2().is_some_and(is_old) || !guest.options.traits.growable;
    let now_bytes = match resized {
        Ok(()) => size_bytes,
        Err(error) if guest.excuses(&error) => return Ok(()),
        Err(error) if refusable && error.kind() != ErrorKind::Corrupt => old_bytes,
        Err(error) => {
            let what = ("resize", size_bytes, preallocation);
            return Err(Failure::error(FailureKind::Request, what, &error));
        }
    };
    if device.size_bytes() != now_bytes {
        let message = format!("the size is {}, not {now_bytes}", device.size_bytes());
        return Err(Failure::new(FailureKind::Request, message));
    }
    guest.model.borrow_mut().end_resize(now_bytes)?;
    Ok(())
}

/// Makes the file as short as what is allocated.
async fn compact(guest: Rc<Guest>, device: Arc<dyn BlockDevice>) -> Result<(), Failure> {
    let Some(image) = device.as_qcow2() else {
        return Ok(());
    };
    let steps = async {
        let mut compaction = image.compact().await?;
        guest.model.borrow_mut().thaw();
        while compaction.step().await?.is_some() {}
        Ok::<(), Error>(())
    };
    match steps.await {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::Unsupported || guest.excuses(&error) => Ok(()),
        Err(error) => Err(Failure::error(FailureKind::Request, "compact", &error)),
    }
}

/// Amends the image and closes it.
async fn amend(
    guest: &Guest,
    device: &dyn BlockDevice,
    amendment: Amendment,
) -> Result<(), Failure> {
    let name_len = amendment.data_file_name_len;
    let is_external = guest.options.data_file != DataFile::Inside;
    let options = AmendOptions::default()
        .version(amendment.version)
        .refcount_bits(amendment.refcount_order.map(|order| 1 << order))
        .lazy_refcounts(amendment.lazy_refcounts)
        .data_file(
            name_len
                .filter(|_| is_external)
                .map(|len| "d".repeat(len as usize)),
        )
        .data_file_raw((amendment.not_raw && is_external).then_some(false));
    if let Some(image) = device.as_qcow2()
        && let Err(error) = image.amend(options, None).await
        && !matches!(
            error.kind(),
            ErrorKind::InvalidArgument | ErrorKind::Unsupported | ErrorKind::NoSpace
        )
    {
        return Err(Failure::error(FailureKind::Request, amendment, &error));
    }
    close(guest, device).await
}

/// Closes a device whose disk fails, and opens it on a disk that does not: what was promised
/// must be there, as after a cut. Then the disk goes on failing.
async fn reopen_failing(
    guest: &Guest,
    device: Arc<dyn BlockDevice>,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    let disk = &guest.plugged.disk;
    close_failing(guest, &*device).await;
    drop(device);
    let faults = disk.set_faults(None);
    guest.plugged.wait_for_requests().await;
    disk.reopen();
    let model = guest.model.borrow().after_cut();
    guest.model.replace(model);
    guest.astray.set(false);
    // It may be in the midst of that as well that the disk fails.
    drop(disk.set_faults(faults));
    let opened = guest.plugged.open(&*guest.engine, &guest.options).await;
    match opened {
        Ok(device) => drop(device.close().await),
        Err(failure) if !disk.has_failed() => return Err(failure),
        Err(_) => {}
    }
    let faults = disk.set_faults(None);
    guest.plugged.wait_for_requests().await;
    disk.reopen();
    let device = guest.plugged.open(&*guest.engine, &guest.options).await?;
    if guest.has_unknown_change() {
        // Whichever end of it is found, a cut would not find the other one any more.
        guest.plugged.make_durable().await;
    }
    examine(guest, &*device, Depth::Quick)
        .await
        .map_err(|failure| failure.when("after a close on a failing disk"))?;
    drop(disk.set_faults(faults));
    Ok(device)
}

async fn finish_one(running: &mut Running) -> Result<bool, Failure> {
    match running.pop_front() {
        Some(task) => task.await.map(|()| true),
        None => Ok(false),
    }
}

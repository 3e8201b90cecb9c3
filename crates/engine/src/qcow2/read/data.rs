//! Reading. A range that lies in one piece on disk goes straight to the storage;
//! anything else is read run by run, many runs at a time.

use std::sync::Arc;

use futures_util::stream::{FuturesUnordered, StreamExt};
use vellum_format::types::GuestOffset;
use vellum_io::shared_memory::{SharedBuffer, total_len};
use vellum_io::{Buffer, Buffers, Io, Result};
use vellum_storage::Event;

use crate::BlockDevice;
use crate::qcow2::checksums::heal::is_mismatch;
use crate::qcow2::commit::epochs::EpochGuard;
use crate::qcow2::compressed::read::{Batch, Piece, batches};
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::{Lookup, MappingRun, RunKind};
use crate::qcow2::read::layers::{DataInUse, LayersInUse};

/// Runs of one request read at the same time.
const MAX_PARALLEL_RUNS: usize = 64;

/// Reads `buffer.len()` bytes at `offset_bytes`.
pub(crate) fn read(image: &Arc<Image>, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
    if let Err(error) = image.check_range("read", offset_bytes, buffer.len() as u64) {
        return Io::ready(Err(error));
    }
    let reading = image.read_epochs.enter();
    let guest = GuestOffset(offset_bytes);
    // Rule 8: before the mapping is looked up. A cluster that is written back meanwhile is found there.
    let kept = image.buffered_pieces(offset_bytes, buffer.len() as u64);
    if !kept.is_empty() {
        let image = image.clone();
        return Io::start(async move {
            let mut buffer = image.read_runs(guest, buffer, reading).await?;
            for (at, piece) in kept {
                let inside = (at - offset_bytes) as usize;
                buffer[inside..inside + piece.len()].copy_from_slice(&piece);
            }
            Ok(buffer)
        });
    }
    if let Some(seal) = &image.seal
        && !seal.is_done(offset_bytes, buffer.len() as u64)
    {
        let image = image.clone();
        return Io::start(async move { image.read_verified(offset_bytes, buffer).await });
    }
    if let Some((data, host)) = one_piece(image, guest, buffer.len() as u64) {
        let len = buffer.len();
        let io = data.storage().read(host, Buffers::from_iter([buffer]));
        if let Some(passage) = data.into_passage() {
            // Others wait for its end: so it does not wait to be polled.
            return Io::start(async move {
                let read = io.into_single().await;
                drop((passage, reading));
                read
            });
        }
        let image = image.may_heal().then(|| image.clone());
        return Io::boxed(async move {
            match (io.into_single().await, image) {
                (Err(error), Some(image)) if is_mismatch(&error) => {
                    let buffer = Buffer::for_read(len);
                    Box::pin(image.read_runs(guest, buffer, reading)).await
                }
                (read, _) => {
                    drop(reading);
                    read
                }
            }
        });
    }
    let image = image.clone();
    Io::start(async move { image.read_runs(guest, buffer, reading).await })
}

/// As [`read`], into memory that others change meanwhile; `None` where the bytes are not what the
/// file holds in one piece, or where anybody looks at them on their way.
pub(crate) fn read_into(
    image: &Arc<Image>,
    offset_bytes: u64,
    into: &[SharedBuffer],
) -> Option<Io<()>> {
    let len_bytes = total_len(into) as u64;
    image.check_range("read", offset_bytes, len_bytes).ok()?;
    let reading = image.read_epochs.enter();
    // In the order of `read`. A part that waits in the write buffer is newer than the file.
    let is_buffered = !image.buffered_pieces(offset_bytes, len_bytes).is_empty();
    if is_buffered || image.seal.is_some() || image.checksums.is_some() {
        return None;
    }
    let (data, host) = one_piece(image, GuestOffset(offset_bytes), len_bytes)?;
    let io = data.storage().read_into(host, into)?;
    let read = |passage| async move {
        let read = io.await;
        drop((passage, reading));
        read
    };
    Some(match data.into_passage() {
        Some(passage) => Io::start(read(Some(passage))),
        None => Io::boxed(read(None)),
    })
}

/// The file and the place in it where a range lies in one piece, as far as memory knows.
fn one_piece(image: &Image, guest: GuestOffset, len_bytes: u64) -> Option<(DataInUse<'_>, u64)> {
    if image.listener.is_some() {
        return None; // who watches events is told of every read, and may hold it
    }
    let Ok(Lookup::Hit(view)) = image.mapper().view(guest, len_bytes) else {
        return None;
    };
    match view[..] {
        [run] if run.len_bytes == len_bytes => match run.kind {
            RunKind::Data { .. } if !image.reads_as_stored() => None,
            RunKind::Data { host, .. } => Some((DataInUse::Fixed(&image.data), host.bytes())),
            RunKind::Unallocated { .. } => image.backing_chain.place(guest.bytes(), len_bytes),
            _ => None,
        },
        _ => None,
    }
}

/// Reads from a device; beyond its end, or without one, there are zeroes.
pub(crate) async fn read_padded(
    device: Option<&Arc<dyn BlockDevice>>,
    offset_bytes: u64,
    mut piece: Buffer,
) -> Result<Buffer> {
    let size_bytes = device.map_or(0, |device| device.size_bytes());
    let there = size_bytes
        .saturating_sub(offset_bytes)
        .min(piece.len() as u64);
    let Some(device) = device.filter(|_| there > 0) else {
        piece.fill(0);
        return Ok(piece);
    };
    if there == piece.len() as u64 {
        return device.read(offset_bytes, piece).await;
    }
    let inside = piece.split_to(there as usize);
    piece.fill(0);
    let inside = device.read(offset_bytes, inside).await?;
    Ok(Buffer::join_all([inside, piece]))
}

impl Image {
    /// What the write buffer holds of a guest range.
    fn buffered_pieces(&self, offset_bytes: u64, len_bytes: u64) -> Vec<(u64, Buffer)> {
        if self.write_buffer.is_empty() {
            return Vec::new();
        }
        let cluster_bytes = self.geometry.cluster_size_bytes();
        self.write_buffer
            .pieces_in(offset_bytes..offset_bytes + len_bytes, cluster_bytes)
    }

    /// Reads a range run by run; `_reading` keeps its clusters from being reused.
    pub(crate) async fn read_runs(
        self: &Arc<Self>,
        from: GuestOffset,
        rest: Buffer,
        reading: EpochGuard,
    ) -> Result<Buffer> {
        self.read_noted_runs(from, rest, reading, |_| ()).await
    }

    /// As [`Image::read_runs`]; `note` is told of each run that is read, in order.
    pub(crate) async fn read_noted_runs(
        self: &Arc<Self>,
        from: GuestOffset,
        mut rest: Buffer,
        _reading: EpochGuard,
        mut note: impl FnMut(&MappingRun),
    ) -> Result<Buffer> {
        let mut at = from.bytes();
        let mut done: Vec<(u64, Buffer)> = Vec::new();
        let mut running = FuturesUnordered::new();
        while !rest.is_empty() {
            let view = self.view(GuestOffset(at), rest.len() as u64).await?;
            view.iter().for_each(&mut note);
            if let [run] = &view[..]
                && run.len_bytes == rest.len() as u64
                && at == from.bytes()
            {
                return self.read_run(run, rest).await;
            }
            let pieces = view.into_iter().map(|run| {
                at += run.len_bytes;
                let buffer = rest.split_to(run.len_bytes as usize);
                Piece { run, buffer }
            });
            for batch in batches(&self.geometry, pieces.collect()) {
                if running.len() >= MAX_PARALLEL_RUNS
                    && let Some(finished) = running.next().await
                {
                    done.extend::<Vec<_>>(finished?);
                }
                running.push(self.read_batch(batch));
            }
        }
        while let Some(finished) = running.next().await {
            done.extend(finished?);
        }
        drop(running);
        done.sort_by_key(|(guest, _)| *guest);
        Ok(Buffer::join_all(done.into_iter().map(|(_, piece)| piece)))
    }

    async fn read_batch(self: &Arc<Self>, mut batch: Batch) -> Result<Vec<(u64, Buffer)>> {
        if batch.len() > 1 {
            return self.read_packed(batch).await;
        }
        let mut done = Vec::with_capacity(1);
        for Piece { run, buffer } in batch.drain(..) {
            done.push((run.guest.bytes(), self.read_run(&run, buffer).await?));
        }
        Ok(done)
    }

    async fn read_run(self: &Arc<Self>, run: &MappingRun, mut piece: Buffer) -> Result<Buffer> {
        match run.kind {
            RunKind::Data { host, .. } if !self.reads_as_stored() => {
                self.read_data(run, host.bytes(), piece).await
            }
            RunKind::Data { host, .. } => {
                self.emit(Event::ReadAio).await;
                let buffers = Buffers::from_iter([piece]);
                let read = self.data.read(host.bytes(), buffers).into_single().await;
                match read {
                    Err(error) if is_mismatch(&error) => {
                        Box::pin(self.read_healing(run, host.bytes(), error)).await
                    }
                    read => read,
                }
            }
            RunKind::Zero { .. } => {
                piece.fill(0);
                Ok(piece)
            }
            RunKind::Unallocated { .. } => {
                if self.backing_covers(run.guest) {
                    self.emit(Event::ReadBackingAio).await;
                }
                let (guest, len) = (run.guest.bytes(), piece.len());
                if let Some(layers) = self.backing_chain.layers() {
                    let read = layers.read(guest, piece).await;
                    let is_final = matches!(layers, LayersInUse::Passed(_));
                    if is_final || !read.as_ref().is_err_and(is_mismatch) {
                        return read;
                    }
                    // The layer itself knows what to do about it.
                    piece = Buffer::for_read(len);
                }
                read_padded(self.backing.as_ref(), guest, piece).await
            }
            RunKind::Compressed(descriptor) => self.read_compressed(run, &descriptor, piece).await,
        }
    }

    /// Whether the backing device has something at a guest offset.
    fn backing_covers(&self, guest: GuestOffset) -> bool {
        let backing = self.backing.as_ref();
        backing.is_some_and(|device| device.size_bytes() > guest.bytes())
    }

    /// Reads a range of the image as it is before the caller changes it; the
    /// caller holds the range. Beyond the end of the device there are zeroes.
    pub(crate) async fn read_old(self: &Arc<Self>, guest: u64, len_bytes: u64) -> Result<Buffer> {
        let inside = self.size_bytes().saturating_sub(guest).min(len_bytes);
        let mut buffer = Buffer::for_read(len_bytes as usize);
        let head = buffer.split_to(inside as usize);
        buffer.fill(0);
        let reading = self.read_epochs.enter();
        let head = self.read_runs(GuestOffset(guest), head, reading).await?;
        Ok(Buffer::join_all([head, buffer]))
    }

    /// Whether the mapping alone says that a range reads as zeroes.
    pub(crate) async fn maps_to_zeroes(&self, guest: u64, len_bytes: u64) -> Result<bool> {
        let end = (guest + len_bytes).min(self.size_bytes());
        let mut at = guest;
        while at < end {
            for run in self.view(GuestOffset(at), end - at).await? {
                let zero = match run.kind {
                    RunKind::Zero { .. } => true,
                    RunKind::Unallocated { .. } => !self.backing_covers(run.guest),
                    _ => false,
                };
                if !zero {
                    return Ok(false);
                }
                at += run.len_bytes;
            }
        }
        Ok(true)
    }
}

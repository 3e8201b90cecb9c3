//! Reads many tables of one size, in the order of the file and several at once.

use std::collections::VecDeque;

use vellum_io::lane::{compute, compute_threads};

use super::source::Image;
use crate::{Buffer, Buffers, Io, Result};

/// Most bytes of one read; tables that lie side by side share a read.
const READ_SIZE_BYTES: u64 = 512 << 10;
/// Reads in flight.
const READS_IN_FLIGHT: usize = 16;

/// What one thread is given at a time, at least: much more than handing it over costs.
const BATCH_BYTES: u64 = 256 << 10;
/// Threads that are given work at the same time, at most: each takes memory.
const MAX_THREADS: usize = 16;

/// One read: `count` tables from number `first` on.
struct Read {
    first: usize,
    io: Io<Buffers>,
}

/// Reads in flight, in order.
struct Reads<'a> {
    image: &'a Image,
    offsets: &'a [u64],
    table_size_bytes: u64,
    running: VecDeque<Read>,
    next: usize,
}

impl<'a> Reads<'a> {
    fn new(image: &'a Image, offsets: &'a [u64], table_size_bytes: u64) -> Self {
        Reads {
            image,
            offsets,
            table_size_bytes,
            running: VecDeque::new(),
            next: 0,
        }
    }

    /// The number of the next tables' first, and their bytes; zeroes beyond the end of
    /// the storage.
    async fn next(&mut self) -> Result<Option<(usize, Buffer)>> {
        while self.running.len() < READS_IN_FLIGHT && self.next < self.offsets.len() {
            let (first, size) = (self.next, self.table_size_bytes);
            let count = adjacent(&self.offsets[first..], size);
            let buffers = Buffers::from_buf([Buffer::for_read(count * size as usize)]);
            let io = self.image.storage.read(self.offsets[first], buffers);
            self.running.push_back(Read { first, io });
            self.next += count;
        }
        let Some(Read { first, io }) = self.running.pop_front() else {
            return Ok(None);
        };
        let tables = io.into_single().await?;
        Ok(Some((first, tables)))
    }
}

/// Calls `each` with the number and the bytes of every table, in order. Bytes
/// beyond the end of the storage are zeroes.
pub(in crate::qcow2) async fn for_each_table(
    image: &Image,
    offsets: &[u64],
    table_size_bytes: u64,
    mut each: impl FnMut(usize, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut reads = Reads::new(image, offsets, table_size_bytes);
    while let Some((first, tables)) = reads.next().await? {
        for (index, table) in tables.chunks_exact(table_size_bytes as usize).enumerate() {
            each(first + index, table)?;
        }
        image.note_read(tables.len() as u64);
    }
    Ok(())
}

/// Tables that one thread deals with: consecutive numbers, in one or more pieces.
#[derive(Debug, Default)]
pub(super) struct Batch {
    first: usize,
    pieces: Vec<Buffer>,
    table_size_bytes: usize,
}

impl Batch {
    /// Numbers and bytes of its tables.
    pub(super) fn tables(&self) -> impl Iterator<Item = (usize, &[u8])> {
        let pieces = self.pieces.iter();
        let tables = pieces.flat_map(|piece| piece.chunks_exact(self.table_size_bytes));
        (self.first..).zip(tables)
    }

    /// The bytes of the table of a number.
    pub(super) fn table(&self, number: usize) -> &[u8] {
        let mut tables = self.tables();
        tables
            .nth(number.wrapping_sub(self.first))
            .map_or(&[], |(_, table)| table)
    }

    fn len_bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len() as u64).sum()
    }

    async fn read(reads: &mut Reads<'_>) -> Result<Option<Batch>> {
        let mut batch = Batch {
            table_size_bytes: reads.table_size_bytes as usize,
            ..Batch::default()
        };
        while batch.len_bytes() < BATCH_BYTES {
            let Some((first, tables)) = reads.next().await? else {
                break;
            };
            if batch.pieces.is_empty() {
                batch.first = first;
            }
            batch.pieces.push(tables);
        }
        Ok((!batch.pieces.is_empty()).then_some(batch))
    }
}

/// Has `work` deal with batches of tables on all cores, and calls `then` with each
/// batch and what came of it, in order.
pub(super) async fn for_each_batch<T: Send + 'static>(
    image: &Image,
    offsets: &[u64],
    table_size_bytes: u64,
    work: impl Fn(&Batch) -> T + Clone + Send + 'static,
    mut then: impl FnMut(&Batch, T),
) -> Result<()> {
    let mut reads = Reads::new(image, offsets, table_size_bytes);
    let most = 2 * compute_threads().min(MAX_THREADS);
    let mut running = VecDeque::new();
    let mut is_first = true;
    loop {
        while running.len() < most {
            let Some(batch) = Batch::read(&mut reads).await? else {
                break;
            };
            if std::mem::take(&mut is_first) && reads.running.is_empty() {
                // All there is: threads would take longer to start.
                let made = work(&batch);
                then(&batch, made);
                image.note_read(batch.len_bytes());
                return Ok(());
            }
            let work = work.clone();
            running.push_back(compute(move || {
                let made = work(&batch);
                drop(work);
                (batch, made)
            }));
        }
        let Some(batch) = running.pop_front() else {
            return Ok(());
        };
        let (batch, made) = batch.await;
        then(&batch, made);
        image.note_read(batch.len_bytes());
    }
}

/// How many tables from the first on lie side by side and fit one read.
fn adjacent(offsets: &[u64], table_size_bytes: u64) -> usize {
    let most = (READ_SIZE_BYTES / table_size_bytes).max(1) as usize;
    let neighbours = offsets
        .windows(2)
        .take(most - 1)
        .take_while(|pair| pair[0].checked_add(table_size_bytes) == Some(pair[1]))
        .count();
    neighbours + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_share_a_read_up_to_its_size() {
        assert_eq!(adjacent(&[0], 512), 1);
        assert_eq!(adjacent(&[0, 512, 1024, 4096], 512), 3);
        assert_eq!(adjacent(&[1024, 512], 512), 1);
        let long: Vec<u64> = (0..5000).map(|i| i * 512).collect();
        assert_eq!(adjacent(&long, 512), 1024);
        assert_eq!(adjacent(&[0, 2 << 20], 2 << 20), 1);
    }
}

//! Reads many tables of one size, in the order of the file and several at once.

use std::collections::VecDeque;

use super::source::Image;
use crate::{Buffer, Buffers, Io, Result};

/// Most bytes of one read; tables that lie side by side share a read.
const READ_SIZE_BYTES: u64 = 1 << 20;
/// Reads in flight.
const READS_IN_FLIGHT: usize = 16;

/// One read: `count` tables from number `first` on.
struct Read {
    first: usize,
    io: Io<Buffers>,
}

/// Calls `each` with the number and the bytes of every table, in order. Bytes
/// beyond the end of the storage are zeroes.
pub(in crate::qcow2) async fn for_each_table(
    image: &Image,
    offsets: &[u64],
    table_size_bytes: u64,
    mut each: impl FnMut(usize, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut running: VecDeque<Read> = VecDeque::new();
    let mut next = 0;
    loop {
        while running.len() < READS_IN_FLIGHT && next < offsets.len() {
            let count = adjacent(&offsets[next..], table_size_bytes);
            let buffer = Buffer::for_read(count * table_size_bytes as usize);
            let io = image
                .storage
                .read(offsets[next], Buffers::from_buf([buffer]));
            running.push_back(Read { first: next, io });
            next += count;
        }
        let Some(Read { first, io }) = running.pop_front() else {
            return Ok(());
        };
        let buffer = io.into_single().await?;
        for (index, table) in buffer.chunks_exact(table_size_bytes as usize).enumerate() {
            each(first + index, table)?;
        }
        image.note_read(buffer.len() as u64);
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
        assert_eq!(adjacent(&long, 512), 2048);
        assert_eq!(adjacent(&[0, 2 << 20], 2 << 20), 1);
    }
}

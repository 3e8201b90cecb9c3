//! One entry of a log, and the log's first sector.

pub(super) const MAGIC: u64 = 0x006a_7366_7773_6872;
pub(super) const VERSION: u64 = 1;
pub(super) const FLUSH: u64 = 1;
pub(super) const FUA: u64 = 2;
pub(super) const DISCARD: u64 = 4;

/// What is recorded of a change.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
    pub(super) flags: u64,
    /// Of a flush: changes behind it that ended before it did.
    pub(super) meanwhile: u64,
    pub(super) data: Data,
}

#[derive(Debug)]
pub(super) enum Data {
    None,
    Bytes(Vec<u8>),
    Zeroes,
}

impl Data {
    /// How much memory it takes, in bytes.
    pub(super) fn len_bytes(&self) -> u64 {
        match self {
            Data::Bytes(bytes) => bytes.len() as u64,
            Data::None | Data::Zeroes => 0,
        }
    }
}

fn put(sector: &mut [u8], words: &[u64]) {
    for (target, word) in sector.chunks_exact_mut(8).zip(words) {
        target.copy_from_slice(&word.to_le_bytes());
    }
}

impl Entry {
    /// Its sector, and the bytes that follow it, if they are no mere zeroes.
    pub(super) fn encoded(&self, sector_bytes: u64) -> Vec<u8> {
        let mut bytes = vec![0; sector_bytes as usize];
        let words = [
            self.offset_bytes / sector_bytes,
            self.len_bytes / sector_bytes,
            self.flags,
            0,
            self.meanwhile,
        ];
        put(&mut bytes, &words);
        if let Data::Bytes(data) = &self.data {
            bytes.extend_from_slice(data);
        }
        bytes
    }
}

/// The first sector of a log with so many entries.
pub(super) fn encoded_head(sector_bytes: u64, entries: u64) -> Vec<u8> {
    let mut head = vec![0; sector_bytes as usize];
    // Valid sizes of sectors fit 32 bits.
    put(&mut head, &[MAGIC, VERSION, entries, sector_bytes]);
    head
}

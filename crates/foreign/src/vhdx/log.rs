//! Entries of the log, and the newest sequence of them that is whole.
//!
//! ```text
//!   [ header, descriptors ][ descriptors ] ... [ data ][ data ] ...      sectors of 4096 bytes
//! ```
//!
//! The log is a ring: an entry may go on at its beginning. Whatever the bytes are, a search takes time
//! in proportion to the log: no sector of an entry but its first can be taken for the first of another.

use super::guid::Guid;
use super::le;

/// The unit of the log, in bytes.
pub(super) const SECTOR_BYTES: usize = 4096;
const HEADER_BYTES: usize = 64;
const DESCRIPTOR_BYTES: usize = 32;

/// What an entry begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EntryHeader {
    pub len_bytes: u32,
    /// Where in the log the sequence begins that ends with this entry, in bytes.
    pub tail_bytes: u32,
    /// One more than that of the entry before; never 0.
    pub sequence: u64,
    pub descriptors: u32,
    pub log: Guid,
    /// The file was at least so long, durably.
    pub flushed_file_bytes: u64,
    /// All structures lie before it.
    pub last_file_bytes: u64,
}

/// One update of the file that an entry tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Update {
    Data { offset_bytes: u64, content: Vec<u8> },
    Zero { offset_bytes: u64, len_bytes: u64 },
}

/// A whole entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub header: EntryHeader,
    pub updates: Vec<Update>,
}

/// How many sectors the header and so many descriptors take.
pub(super) fn descriptor_sectors(descriptors: usize) -> usize {
    (HEADER_BYTES + descriptors * DESCRIPTOR_BYTES).div_ceil(SECTOR_BYTES)
}

impl EntryHeader {
    fn decode(sector: &[u8]) -> Option<EntryHeader> {
        if !sector.starts_with(b"loge") {
            return None;
        }
        let header = EntryHeader {
            len_bytes: le::le32(sector, 8)?,
            tail_bytes: le::le32(sector, 12)?,
            sequence: le::le64(sector, 16)?,
            descriptors: le::le32(sector, 24)?,
            log: Guid::at(sector, 32)?,
            flushed_file_bytes: le::le64(sector, 48)?,
            last_file_bytes: le::le64(sector, 56)?,
        };
        let len_bytes = header.len_bytes as usize;
        let is_sound = len_bytes.is_multiple_of(SECTOR_BYTES)
            && (header.tail_bytes as usize).is_multiple_of(SECTOR_BYTES)
            && header.sequence > 0
            && header.descriptors as usize <= len_bytes / DESCRIPTOR_BYTES
            && descriptor_sectors(header.descriptors as usize) <= len_bytes / SECTOR_BYTES;
        is_sound.then_some(header)
    }

    fn sectors(&self) -> usize {
        self.len_bytes as usize / SECTOR_BYTES
    }
}

/// The log as it lies in the file: a whole number of sectors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Log<'a> {
    bytes: &'a [u8],
    id: Guid,
}

/// Where the entries of a sequence begin, oldest first, in sectors of the log.
pub(super) type Sequence = Vec<usize>;

impl<'a> Log<'a> {
    /// The log whose entries have this identity.
    pub(super) fn new(bytes: &'a [u8], id: Guid) -> Log<'a> {
        let len = bytes.len() - bytes.len() % SECTOR_BYTES;
        Log {
            bytes: &bytes[..len],
            id,
        }
    }

    fn sectors(&self) -> usize {
        self.bytes.len() / SECTOR_BYTES
    }

    /// A sector, counted round the ring.
    fn sector(&self, at: usize) -> &'a [u8] {
        let at = at.checked_rem(self.sectors()).unwrap_or(0) * SECTOR_BYTES;
        self.bytes.get(at..at + SECTOR_BYTES).unwrap_or_default()
    }

    /// The entry that begins at a sector, if it is whole.
    pub(super) fn entry(&self, at: usize) -> Option<Entry> {
        let header = EntryHeader::decode(self.sector(at))?;
        if header.log != self.id || header.sectors() > self.sectors() {
            return None;
        }
        let mut updates = Vec::new();
        let mut data = at + descriptor_sectors(header.descriptors as usize);
        let end = at + header.sectors();
        for index in 0..header.descriptors as usize {
            let place = HEADER_BYTES + index * DESCRIPTOR_BYTES;
            let sector = self.sector(at + place / SECTOR_BYTES);
            let descriptor = sector.get(place % SECTOR_BYTES..)?;
            updates.push(self.update(descriptor, header.sequence, &mut data, end)?);
        }
        // Also that no sector of it is the first of another one, before any sum is taken.
        if data != end || !self.has_checksum(at, &header) {
            return None;
        }
        Some(Entry { header, updates })
    }

    /// What a descriptor says; `data` is where the next data sector is.
    fn update(
        &self,
        descriptor: &[u8],
        sequence: u64,
        data: &mut usize,
        end: usize,
    ) -> Option<Update> {
        let offset_bytes = le::le64(descriptor, 16)?;
        if le::le64(descriptor, 24)? != sequence
            || !offset_bytes.is_multiple_of(SECTOR_BYTES as u64)
        {
            return None;
        }
        match descriptor.get(..4)? {
            b"zero" => {
                let len_bytes = le::le64(descriptor, 8)?;
                len_bytes
                    .is_multiple_of(SECTOR_BYTES as u64)
                    .then_some(Update::Zero {
                        offset_bytes,
                        len_bytes,
                    })
            }
            b"desc" if *data < end => {
                let sector = self.sector(*data);
                *data += 1;
                let high = le::le32(sector, 4)?;
                let low = le::le32(sector, 4092)?;
                if !sector.starts_with(b"data")
                    || u64::from(high) << 32 | u64::from(low) != sequence
                {
                    return None;
                }
                let mut content = descriptor.get(8..16)?.to_vec();
                content.extend_from_slice(sector.get(8..4092)?);
                content.extend_from_slice(descriptor.get(4..8)?);
                Some(Update::Data {
                    offset_bytes,
                    content,
                })
            }
            _ => None,
        }
    }

    fn has_checksum(&self, at: usize, header: &EntryHeader) -> bool {
        let first = self.sector(at);
        let Some(mut sum) = le::checksum(first) else {
            return false;
        };
        for next in 1..header.sectors() {
            sum = crc32c::crc32c_append(sum, self.sector(at + next));
        }
        le::le32(first, 4) == Some(sum)
    }

    /// The newest sequence that is whole: what has to be replayed.
    pub(super) fn active(&self) -> Option<Sequence> {
        let mut newest: Option<(u64, Sequence)> = None;
        let mut at = 0;
        while at < self.sectors() {
            let Some((chain, end, head)) = self.chain(at) else {
                at += 1;
                continue;
            };
            at = end;
            // What comes behind an entry in a chain ends as that does, so no other part is looked at.
            let tail = head.tail_bytes as usize / SECTOR_BYTES;
            let begins = chain
                .iter()
                .position(|entry| entry % self.sectors() == tail);
            if let Some(begins) = begins
                && newest
                    .as_ref()
                    .is_none_or(|(sequence, _)| *sequence < head.sequence)
            {
                let entries = chain.into_iter().skip(begins);
                newest = Some((head.sequence, entries.collect()));
            }
        }
        newest.map(|(_, sequence)| sequence)
    }

    /// The entries from a sector on whose numbers follow each other, where they end, and the last.
    fn chain(&self, at: usize) -> Option<(Sequence, usize, EntryHeader)> {
        let mut head = self.entry(at)?.header;
        let mut entries = vec![at];
        let mut end = at + head.sectors();
        while end < at + self.sectors()
            && let Some(next) = self.entry(end)
            && Some(next.header.sequence) == head.sequence.checked_add(1)
            && end + next.header.sectors() <= at + self.sectors()
        {
            head = next.header;
            entries.push(end);
            end += head.sectors();
        }
        Some((entries, end, head))
    }
}

/// An entry that has whole sectors of the file written; its length and its count are set here.
pub(super) fn encode(mut header: EntryHeader, pages: &[(u64, Vec<u8>)]) -> Vec<u8> {
    let descriptor_sectors = descriptor_sectors(pages.len());
    let mut bytes = vec![0; (descriptor_sectors + pages.len()) * SECTOR_BYTES];
    header.len_bytes = bytes.len() as u32;
    header.descriptors = pages.len() as u32;
    le::put(&mut bytes, 0, b"loge");
    le::put(&mut bytes, 8, &header.len_bytes.to_le_bytes());
    le::put(&mut bytes, 12, &header.tail_bytes.to_le_bytes());
    le::put(&mut bytes, 16, &header.sequence.to_le_bytes());
    le::put(&mut bytes, 24, &header.descriptors.to_le_bytes());
    le::put(&mut bytes, 32, &header.log.0);
    le::put(&mut bytes, 48, &header.flushed_file_bytes.to_le_bytes());
    le::put(&mut bytes, 56, &header.last_file_bytes.to_le_bytes());
    for (index, (offset_bytes, page)) in pages.iter().enumerate() {
        debug_assert_eq!(page.len(), SECTOR_BYTES);
        let (leading, middle, trailing) = match page.split_at_checked(SECTOR_BYTES - 4) {
            Some((front, trailing)) => (front.get(..8), front.get(8..), trailing),
            None => continue,
        };
        let at = HEADER_BYTES + index * DESCRIPTOR_BYTES;
        le::put(&mut bytes, at, b"desc");
        le::put(&mut bytes, at + 4, trailing);
        le::put(&mut bytes, at + 8, leading.unwrap_or_default());
        le::put(&mut bytes, at + 16, &offset_bytes.to_le_bytes());
        le::put(&mut bytes, at + 24, &header.sequence.to_le_bytes());
        let at = (descriptor_sectors + index) * SECTOR_BYTES;
        le::put(&mut bytes, at, b"data");
        le::put(
            &mut bytes,
            at + 4,
            &((header.sequence >> 32) as u32).to_le_bytes(),
        );
        le::put(&mut bytes, at + 8, middle.unwrap_or_default());
        le::put(
            &mut bytes,
            at + 4092,
            &(header.sequence as u32).to_le_bytes(),
        );
    }
    le::put_checksum(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: Guid = Guid::BAT_REGION;

    fn header(sequence: u64, tail_sector: usize) -> EntryHeader {
        EntryHeader {
            len_bytes: 0,
            tail_bytes: (tail_sector * SECTOR_BYTES) as u32,
            sequence,
            descriptors: 0,
            log: ID,
            flushed_file_bytes: 1 << 20,
            last_file_bytes: 2 << 20,
        }
    }

    fn page(fill: u8) -> Vec<u8> {
        (0..SECTOR_BYTES)
            .map(|at| fill.wrapping_add(at as u8))
            .collect()
    }

    /// Puts an entry into a log, round its end.
    fn put(log: &mut [u8], at_sector: usize, entry: &[u8]) {
        let sectors = log.len() / SECTOR_BYTES;
        for (index, sector) in entry.chunks(SECTOR_BYTES).enumerate() {
            let at = (at_sector + index) % sectors * SECTOR_BYTES;
            log[at..at + SECTOR_BYTES].copy_from_slice(sector);
        }
    }

    #[test]
    fn an_entry_goes_there_and_back_also_round_the_end() {
        let pages: Vec<_> = (0..130).map(|at| (at * 8192, page(at as u8))).collect();
        let bytes = encode(header(1 << 33 | 5, 0), &pages);
        assert_eq!(bytes.len(), (2 + 130) * SECTOR_BYTES);
        let mut log = vec![0; 200 * SECTOR_BYTES];
        put(&mut log, 150, &bytes);
        let entry = Log::new(&log, ID).entry(150).unwrap();
        assert_eq!(entry.updates.len(), 130);
        for (update, (offset_bytes, content)) in entry.updates.into_iter().zip(pages) {
            assert_eq!(
                update,
                Update::Data {
                    offset_bytes,
                    content
                }
            );
        }
        assert_eq!(Log::new(&log, Guid::NIL).entry(150), None);
        log[160 * SECTOR_BYTES + 100] ^= 1;
        assert_eq!(Log::new(&log, ID).entry(150), None);
    }

    #[test]
    fn the_newest_whole_sequence_is_the_active_one() {
        let mut log = vec![0; 32 * SECTOR_BYTES];
        // 7 and 8 go round the end; 3 is older; 9 was torn.
        let entry = |sequence, tail| encode(header(sequence, tail), &[(0, page(1))]);
        put(&mut log, 29, &entry(7, 29));
        put(&mut log, 31, &entry(8, 29));
        put(&mut log, 10, &entry(3, 10));
        let mut torn = entry(9, 29);
        torn[5000] ^= 1;
        put(&mut log, 1, &torn);
        assert_eq!(Log::new(&log, ID).active(), Some(vec![29, 31]));
        // A sequence begins where its last entry says.
        put(&mut log, 1, &entry(9, 31));
        assert_eq!(Log::new(&log, ID).active(), Some(vec![31, 33]));
        // One that lacks its beginning does not count.
        put(&mut log, 1, &entry(9, 20));
        assert_eq!(Log::new(&log, ID).active(), Some(vec![10]));
        assert_eq!(Log::new(&[], ID).active(), None);
    }

    #[test]
    fn an_entry_without_descriptors_is_one() {
        let bytes = encode(header(1, 0), &[]);
        let entry = Log::new(&bytes, ID).entry(0).unwrap();
        assert!(entry.updates.is_empty());
        assert_eq!(Log::new(&bytes, ID).active(), Some(vec![0]));
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_sequence_or_none(
            changes in proptest::collection::vec((0usize..8 * SECTOR_BYTES, any::<u8>()), 0..20),
            resum in any::<bool>(),
        ) {
            let mut log = vec![0; 8 * SECTOR_BYTES];
            put(&mut log, 0, &encode(header(1, 0), &[(0, page(3))]));
            put(&mut log, 2, &encode(header(2, 0), &[(0, page(4)), (4096, page(5))]));
            for (at, value) in changes {
                log[at % 200] = value;
                log[at] = value;
            }
            if resum {
                le::put_checksum(&mut log[..2 * SECTOR_BYTES]);
            }
            if let Some(sequence) = Log::new(&log, ID).active() {
                for at in sequence {
                    prop_assert!(Log::new(&log, ID).entry(at).is_some());
                }
            }
        }
    }
}

//! Who reads on where it has stopped: how far ahead it is worth fetching.
//!
//! A read that begins where none has ended stands for itself; one that goes on makes a stream,
//! for which about as much is fetched ahead as it has read so far. Plain state, no I/O.

use std::ops::Range;

/// As many readers that go their own way are told apart.
const MOST_STREAMS: usize = 16;
/// Requests of one reader overtake each other by so much at most, in blocks.
const DISORDER_BLOCKS: u64 = 64;

/// The readers of one storage. All numbers are of blocks.
#[derive(Debug)]
pub(crate) struct Streams {
    known: Vec<Stream>,
    /// Fetched ahead at first; 0: nothing ever.
    first: u64,
    /// Fetched ahead at most.
    most: u64,
    clock: u64,
}

#[derive(Debug)]
struct Stream {
    /// Behind the furthest block that was read.
    next: u64,
    /// Behind the furthest block that was fetched ahead.
    ahead: u64,
    read: u64,
    goes_on: bool,
    used: u64,
}

impl Stream {
    fn takes(&self, blocks: &Range<u64>) -> bool {
        if !self.goes_on {
            // The last block may have been read in parts.
            return blocks.start <= self.next && blocks.start + 1 >= self.next;
        }
        let disorder = DISORDER_BLOCKS.max(self.ahead.saturating_sub(self.next));
        blocks.start <= self.next + disorder && blocks.end + DISORDER_BLOCKS >= self.next
    }
}

impl Streams {
    pub(crate) fn new(first: u64, most: u64) -> Self {
        Streams {
            known: Vec::new(),
            first,
            most: most.max(first),
            clock: 0,
        }
    }

    /// Notes a read; says which blocks behind it to fetch ahead, `room` at most.
    pub(crate) fn note(&mut self, blocks: Range<u64>, room: u64) -> Range<u64> {
        self.clock += 1;
        let clock = self.clock;
        let (first, most) = (self.first, self.most);
        let Some(stream) = self.known.iter_mut().find(|stream| stream.takes(&blocks)) else {
            self.begin(blocks);
            return 0..0;
        };
        stream.used = clock;
        if blocks.end <= stream.next {
            return 0..0;
        }
        stream.read += blocks.end - blocks.start.max(stream.next);
        stream.next = blocks.end;
        stream.goes_on = true;
        stream.ahead = stream.ahead.max(stream.next);
        let window = (2 * stream.read).clamp(first, most);
        let there = stream.ahead - stream.next;
        if first == 0 || there > window / 2 {
            return 0..0;
        }
        let from = stream.ahead;
        stream.ahead += (window - there).min(room);
        from..stream.ahead
    }

    fn begin(&mut self, blocks: Range<u64>) {
        if self.known.len() == MOST_STREAMS {
            let oldest = (0..MOST_STREAMS).min_by_key(|&at| self.known[at].used);
            self.known.swap_remove(oldest.unwrap_or(0));
        }
        self.known.push(Stream {
            next: blocks.end,
            ahead: blocks.end,
            read: blocks.end - blocks.start,
            goes_on: false,
            used: self.clock,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_goes_on_is_read_ahead_of() {
        let mut streams = Streams::new(4, 64);
        assert_eq!(streams.note(0..1, 1000), 0..0);
        assert_eq!(streams.note(1..2, 1000), 2..6);
        let mut fetched = 6;
        for at in 2..200 {
            let ahead = streams.note(at..at + 1, 1000);
            if !ahead.is_empty() {
                assert_eq!(ahead.start, fetched);
                fetched = ahead.end;
            }
            assert!(
                fetched > at + 1 && fetched <= at + 1 + 64,
                "{at}: {fetched}"
            );
        }
        assert!(fetched >= 200 + 32);
    }

    #[test]
    fn requests_of_one_reader_may_overtake_each_other() {
        let mut streams = Streams::new(4, 256);
        streams.note(0..32, 1000);
        assert_eq!(streams.note(32..64, 1000), 64..192);
        assert_eq!(streams.note(96..128, 1000), 192..320);
        assert_eq!(streams.note(64..96, 1000), 0..0);
        assert_eq!(streams.note(128..160, 1000), 0..0);
        assert_eq!(streams.note(160..192, 1000), 320..448);
        assert_eq!(streams.known.len(), 1);
    }

    #[test]
    fn reads_here_and_there_stand_for_themselves() {
        let mut streams = Streams::new(4, 64);
        for at in 0..1000 {
            assert_eq!(
                streams.note(at * 7919 % 100_000..at * 7919 % 100_000 + 1, 99),
                0..0
            );
        }
        assert_eq!(streams.known.len(), MOST_STREAMS);
    }

    #[test]
    fn the_room_is_kept_to_and_nothing_means_nothing() {
        let mut streams = Streams::new(4, 64);
        streams.note(0..1, 3);
        assert_eq!(streams.note(1..2, 3), 2..5);
        let mut streams = Streams::new(0, 0);
        for at in 0..100 {
            assert_eq!(streams.note(at..at + 1, 1000), 0..0);
        }
    }
}

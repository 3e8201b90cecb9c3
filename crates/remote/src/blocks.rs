//! The blocks of a file that are in memory, on their way, or wanted.
//!
//! Plain state behind the lock of its owner ([`crate::fetch`]); no I/O.
//!
//! Invariants:
//! - A block is fetched once, however many wait for it.
//! - Blocks in memory are `most` at most, beside those that a reader holds just now.
//! - Blocks that were fetched ahead and that nobody has read yet are half of these at most.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use event_listener::{Event, listener};
use vellum_io::Result;

/// Length of a block: the last one of a file may be shorter. What is asked for at random is
/// fetched in such pieces; over a distance the way costs more than the bytes.
pub(crate) const BLOCK_BYTES: u64 = 64 << 10;
/// Longest range that is asked for at once.
pub(crate) const PIECE_BLOCKS: u64 = 16;

/// Where a block arrives.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    content: OnceLock<Result<Vec<u8>>>,
    arrived: Event,
}

impl Slot {
    /// The block, once it is there.
    pub(crate) async fn wait(&self) -> Result<&[u8]> {
        while self.content.get().is_none() {
            listener!(self.arrived => listener);
            // It may have come before anybody listened.
            if self.content.get().is_none() {
                listener.await;
            }
        }
        match self.content.get() {
            Some(Ok(bytes)) => Ok(bytes),
            Some(Err(error)) => Err(error.clone()),
            None => unreachable!("the loop ends once it is there"),
        }
    }

    fn fill(&self, content: Result<Vec<u8>>) {
        // It is filled once: only the piece that it belongs to does.
        let _ = self.content.set(content);
        self.arrived.notify(usize::MAX);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Somebody waits for it.
    Wanted,
    /// Somebody may come to read it.
    Ahead,
    Fetching,
    /// In memory. `true`: it was read more than once.
    Ready(bool),
}

#[derive(Debug)]
struct Block {
    slot: Arc<Slot>,
    phase: Phase,
    unread: bool,
}

/// All blocks that are not merely on the server.
#[derive(Debug)]
pub(crate) struct Blocks {
    known: HashMap<u64, Block>,
    wanted: VecDeque<u64>,
    ahead: VecDeque<u64>,
    /// In memory, in the order in which they may go.
    ready: VecDeque<u64>,
    most: usize,
    unread: usize,
}

impl Blocks {
    pub(crate) fn new(most: usize) -> Self {
        Blocks {
            known: HashMap::new(),
            wanted: VecDeque::new(),
            ahead: VecDeque::new(),
            ready: VecDeque::new(),
            most,
            unread: 0,
        }
    }

    /// The place of a block that is to be read now.
    pub(crate) fn want(&mut self, index: u64) -> Arc<Slot> {
        if let Some(block) = self.known.get_mut(&index) {
            if std::mem::take(&mut block.unread) {
                self.unread -= 1;
            } else if let Phase::Ready(again) = &mut block.phase {
                *again = true;
            }
            if block.phase == Phase::Ahead {
                block.phase = Phase::Wanted;
                self.wanted.push_back(index);
            }
            return block.slot.clone();
        }
        self.wanted.push_back(index);
        self.add(index, Phase::Wanted)
    }

    /// Notes that a block may be read soon.
    pub(crate) fn want_ahead(&mut self, index: u64) {
        if self.room_ahead() > 0 && !self.known.contains_key(&index) {
            self.ahead.push_back(index);
            self.unread += 1;
            self.add(index, Phase::Ahead);
        }
    }

    fn add(&mut self, index: u64, phase: Phase) -> Arc<Slot> {
        let slot = Arc::<Slot>::default();
        let block = Block {
            slot: slot.clone(),
            phase,
            unread: phase == Phase::Ahead,
        };
        self.known.insert(index, block);
        slot
    }

    /// How many more blocks may be fetched ahead.
    pub(crate) fn room_ahead(&self) -> u64 {
        (self.most / 2).saturating_sub(self.unread) as u64
    }

    /// About how many pieces wait to be fetched.
    pub(crate) fn waiting_pieces(&self) -> usize {
        (self.wanted.len() + self.ahead.len()).div_ceil(PIECE_BLOCKS as usize)
    }

    fn phase(&self, index: u64) -> Option<Phase> {
        self.known.get(&index).map(|block| block.phase)
    }

    fn pop(queue: &mut VecDeque<u64>, known: &HashMap<u64, Block>, phase: Phase) -> Option<u64> {
        while let Some(index) = queue.pop_front() {
            // It may have been taken along by a piece already.
            if known.get(&index).is_some_and(|block| block.phase == phase) {
                return Some(index);
            }
        }
        None
    }

    /// Takes the next neighbours to be fetched; those that somebody waits for come first.
    pub(crate) fn next_piece(&mut self) -> Option<Range<u64>> {
        let first = Self::pop(&mut self.wanted, &self.known, Phase::Wanted)
            .or_else(|| Self::pop(&mut self.ahead, &self.known, Phase::Ahead))?;
        let mut piece = first..first + 1;
        // What was wanted later may lie before; nobody is to wait for what is not wanted.
        while piece.start > 0
            && piece.end - piece.start < PIECE_BLOCKS
            && self.phase(piece.start - 1) == Some(Phase::Wanted)
        {
            piece.start -= 1;
        }
        while piece.end - piece.start < PIECE_BLOCKS
            && matches!(self.phase(piece.end), Some(Phase::Wanted | Phase::Ahead))
        {
            piece.end += 1;
        }
        for index in piece.clone() {
            if let Some(block) = self.known.get_mut(&index) {
                block.phase = Phase::Fetching;
            }
        }
        Some(piece)
    }

    /// Puts a block of a piece where it is waited for. One that failed is fetched anew for
    /// whoever wants it next.
    pub(crate) fn arrived(&mut self, index: u64, content: Result<Vec<u8>>) {
        let Some(block) = self.known.get_mut(&index) else {
            return;
        };
        block.slot.fill(content);
        if matches!(block.slot.content.get(), Some(Ok(_))) {
            block.phase = Phase::Ready(false);
            self.ready.push_back(index);
            self.evict();
        } else {
            self.forget(index);
        }
    }

    fn forget(&mut self, index: u64) {
        if self.known.remove(&index).is_some_and(|block| block.unread) {
            self.unread -= 1;
        }
    }

    fn evict(&mut self) {
        while self.ready.len() > self.most {
            let Some(index) = self.ready.pop_front() else {
                return;
            };
            match self.known.get_mut(&index).map(|block| &mut block.phase) {
                Some(Phase::Ready(again)) if *again => {
                    *again = false;
                    self.ready.push_back(index);
                }
                _ => self.forget(index),
            }
        }
    }

    /// Fails what nobody has begun to fetch; what is in memory stays.
    pub(crate) fn fail_waiting(&mut self, error: &vellum_io::Error) {
        while let Some(piece) = self.next_piece() {
            for index in piece {
                self.arrived(index, Err(error.clone()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::{Error, ErrorKind};

    use super::*;

    fn fetch(blocks: &mut Blocks) -> Range<u64> {
        let piece = blocks.next_piece().unwrap();
        for index in piece.clone() {
            blocks.arrived(index, Ok(vec![index as u8]));
        }
        piece
    }

    #[test]
    fn neighbours_are_fetched_together_and_once() {
        let mut blocks = Blocks::new(100);
        for index in [7, 3, 5, 4, 5] {
            blocks.want(index);
        }
        blocks.want_ahead(6);
        blocks.want_ahead(8);
        // 7 is wanted first; 6 before it is not wanted by anybody.
        assert_eq!(fetch(&mut blocks), 7..9);
        assert_eq!(fetch(&mut blocks), 3..7);
        assert_eq!(blocks.next_piece(), None);
        blocks.want(5);
        assert_eq!(blocks.next_piece(), None);
    }

    #[test]
    fn long_ranges_are_cut() {
        let mut blocks = Blocks::new(1000);
        for index in 0..40 {
            blocks.want(index);
        }
        assert_eq!(blocks.waiting_pieces(), 3);
        assert_eq!(fetch(&mut blocks), 0..16);
        assert_eq!(fetch(&mut blocks), 16..32);
        assert_eq!(fetch(&mut blocks), 32..40);
    }

    #[test]
    fn memory_is_bounded_and_keeps_what_is_read_again() {
        let mut blocks = Blocks::new(8);
        blocks.want(1000);
        fetch(&mut blocks);
        for index in 0..100 {
            blocks.want(1000);
            blocks.want(index);
            while blocks.next_piece().is_some_and(|piece| {
                for index in piece {
                    blocks.arrived(index, Ok(Vec::new()));
                }
                true
            }) {}
            assert!(blocks.ready.len() <= 8 && blocks.known.len() <= 8);
        }
        assert!(blocks.known.contains_key(&1000));
    }

    #[test]
    fn only_so_much_is_fetched_ahead() {
        let mut blocks = Blocks::new(8);
        for index in 0..100 {
            blocks.want_ahead(index);
        }
        assert_eq!(fetch(&mut blocks), 0..4);
        assert_eq!(blocks.room_ahead(), 0);
        blocks.want(2);
        assert_eq!(blocks.room_ahead(), 1);
        // Nobody reads what was fetched, and it goes in the end.
        for index in 200..300 {
            blocks.want(index);
            fetch(&mut blocks);
        }
        assert_eq!(blocks.room_ahead(), 4);
    }

    #[test]
    fn what_failed_is_fetched_anew() {
        let mut blocks = Blocks::new(8);
        let slot = blocks.want(1);
        let error = Error::new(ErrorKind::Io, "read", "no");
        blocks.fail_waiting(&error);
        assert!(matches!(slot.content.get(), Some(Err(_))));
        blocks.want(1);
        assert_eq!(fetch(&mut blocks), 1..2);
    }
}

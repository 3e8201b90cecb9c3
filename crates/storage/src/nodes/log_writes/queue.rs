//! What is to be appended to a log, in the order that a power cut needs.
//!
//! Invariant: a flush stands where it was asked for, everything else where it ended. So what
//! stands before a flush is durable once the flush has ended, and what ended while the disk
//! was busy with it, which it need not cover, stands behind it.

use std::collections::VecDeque;

use super::entry::{Data, Entry, FLUSH};
use vellum_io::{Error, Result};

/// Where the log ends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Position {
    pub(super) next_sector: u64,
    pub(super) entries: u64,
}

#[derive(Debug)]
enum Slot {
    Ended(Entry),
    /// A flush that the disk has not done with.
    Flushing,
    /// A flush that failed.
    Failed,
}

/// Entries that are not in the log yet.
#[derive(Debug)]
pub(super) struct Queue {
    slots: VecDeque<Slot>,
    /// The number of the first slot.
    first: u64,
    /// Data of the slots, in bytes.
    data_bytes: u64,
    pub(super) position: Position,
    /// Why there is a hole in the log. What came after it would be taken for what came
    /// after the entry before it, so nothing does.
    broken: Option<Error>,
}

impl Queue {
    pub(super) fn new(position: Position) -> Self {
        Queue {
            slots: VecDeque::new(),
            first: 0,
            data_bytes: 0,
            position,
            broken: None,
        }
    }

    fn push(&mut self, slot: Slot) -> u64 {
        self.slots.push_back(slot);
        self.first + self.slots.len() as u64 - 1
    }

    /// An entry could not be appended.
    pub(super) fn break_off(&mut self, error: Error) {
        self.broken = Some(error);
        self.slots.clear();
        self.data_bytes = 0;
    }

    /// Whether entries can still be appended.
    pub(super) fn check(&self) -> Result<()> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// Takes in what has ended; the number of its slot.
    pub(super) fn ended(&mut self, entry: Entry) -> Result<u64> {
        self.check()?;
        self.data_bytes += entry.data.len_bytes();
        Ok(self.push(Slot::Ended(entry)))
    }

    /// Keeps a place for a flush that is about to be asked for.
    pub(super) fn flushing(&mut self) -> Result<u64> {
        self.check()?;
        Ok(self.push(Slot::Flushing))
    }

    /// A flush has ended, and with it those that were asked for before it: what they cover
    /// is durable.
    pub(super) fn flushed(&mut self, number: u64) {
        let last = number.saturating_sub(self.first) as usize;
        if number < self.first {
            return;
        }
        let mut meanwhile = 0;
        for (at, slot) in self.slots.iter_mut().enumerate().rev() {
            match slot {
                Slot::Ended(entry) if entry.flags & FLUSH == 0 => meanwhile += 1,
                Slot::Flushing if at <= last => {
                    *slot = Slot::Ended(Entry {
                        offset_bytes: 0,
                        len_bytes: 0,
                        flags: FLUSH,
                        meanwhile,
                        data: Data::None,
                    });
                }
                _ => {}
            }
        }
    }

    /// A flush has failed, unless a later one has made good for it.
    pub(super) fn failed(&mut self, number: u64) {
        let at = number.wrapping_sub(self.first) as usize;
        if let Some(slot @ Slot::Flushing) = self.slots.get_mut(at) {
            *slot = Slot::Failed;
        }
    }

    /// The next entry that may be appended.
    pub(super) fn next(&mut self) -> Option<Entry> {
        while let Some(slot) = self.slots.pop_front() {
            match slot {
                Slot::Flushing => {
                    self.slots.push_front(slot);
                    return None;
                }
                Slot::Failed => self.first += 1,
                Slot::Ended(entry) => {
                    self.first += 1;
                    self.data_bytes -= entry.data.len_bytes();
                    return Some(entry);
                }
            }
        }
        None
    }

    /// Whether a slot has left.
    pub(super) fn is_gone(&self, number: u64) -> bool {
        number < self.first
    }

    /// Bytes that wait here.
    pub(super) fn waiting_bytes(&self) -> u64 {
        self.data_bytes
    }
}

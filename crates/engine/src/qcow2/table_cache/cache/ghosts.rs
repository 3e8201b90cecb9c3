//! Ghosts: fingerprints of tables that were evicted not long ago. A table that
//! comes back while its ghost is there was evicted too early.

/// A lossy set: a newer ghost takes the place of an older one.
#[derive(Debug, Default)]
pub(super) struct Ghosts {
    /// 0 is an empty place.
    prints: Vec<u32>,
}

impl Ghosts {
    fn place(&self, hash: u64) -> usize {
        hash as usize & (self.prints.len() - 1)
    }

    fn print(hash: u64) -> u32 {
        (hash >> 32) as u32 | 1
    }

    /// Remembers an evicted table, among about `most` others.
    pub(super) fn add(&mut self, hash: u64, most: usize) {
        let len = most.next_power_of_two();
        if self.prints.len() < len {
            self.prints = Vec::new();
            self.prints.resize(len, 0);
        }
        let place = self.place(hash);
        self.prints[place] = Self::print(hash);
    }

    /// Whether a table was remembered; forgets it.
    pub(super) fn take(&mut self, hash: u64) -> bool {
        if self.prints.is_empty() {
            return false;
        }
        let place = self.place(hash);
        let found = self.prints[place] == Self::print(hash);
        if found {
            self.prints[place] = 0;
        }
        found
    }

    /// Bytes of memory.
    pub(super) fn heap_bytes(&self) -> usize {
        self.prints.capacity() * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ghost_is_seen_once() {
        let mut ghosts = Ghosts::default();
        assert!(!ghosts.take(7 << 32));
        ghosts.add(7 << 32, 100);
        assert!(!ghosts.take(8 << 33), "another print in the same place");
        assert!(ghosts.take(7 << 32));
        assert!(!ghosts.take(7 << 32));
    }
}

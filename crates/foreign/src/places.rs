//! [`Places`]: places for blocks of one size, one behind another at the end of a file; and [`FreePlaces`], those that
//! were given back.

use std::collections::BTreeSet;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Places {
    /// Of each place.
    len_bytes: u64,
    /// Where the next new one begins.
    end_bytes: u64,
    free: FreePlaces,
}

/// Places that were given out and given back, as what was to be put there could not be written.
#[derive(Debug, Default)]
pub(crate) struct FreePlaces(BTreeSet<u64>);

impl FreePlaces {
    /// Takes a place back that nothing was put into, or nothing that counts.
    pub(crate) fn give_back(&mut self, start: u64) {
        self.0.insert(start);
    }

    /// The first one. Anything may be in it.
    pub(crate) fn take(&mut self) -> Option<u64> {
        self.0.pop_first()
    }

    /// Forgets all of them.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Where the last place in use ends, if places of a length end at `end`. What is behind it has to become zeroes.
    pub(crate) fn cut(&mut self, mut end: u64, len: u64) -> u64 {
        while let Some(last) = end.checked_sub(len)
            && self.0.remove(&last)
        {
            end = last;
        }
        end
    }
}

/// A place for a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NewPlace {
    pub(crate) start_bytes: u64,
    /// Nobody had it before.
    pub(crate) is_new: bool,
}

impl Places {
    /// Places of a length from an offset on.
    pub(crate) fn new(end_bytes: u64, len_bytes: u64) -> Places {
        Places {
            len_bytes,
            end_bytes,
            free: FreePlaces::default(),
        }
    }

    /// Behind it is no place that was given out.
    pub(crate) fn end_bytes(&self) -> u64 {
        self.end_bytes
    }

    /// The place that is given out next, if all of it is below an offset.
    pub(crate) fn take_below(&mut self, most_bytes: u64) -> Option<NewPlace> {
        if let Some(start_bytes) = self.free.take() {
            return Some(NewPlace {
                start_bytes,
                is_new: false,
            });
        }
        let start_bytes = self.end_bytes;
        let end_bytes = start_bytes.checked_add(self.len_bytes)?;
        (end_bytes <= most_bytes).then(|| {
            self.end_bytes = end_bytes;
            NewPlace {
                start_bytes,
                is_new: true,
            }
        })
    }

    /// Takes a place back that nothing was put into, or nothing that counts.
    pub(crate) fn give_back(&mut self, start_bytes: u64) {
        self.free.give_back(start_bytes);
    }

    /// Has the end be where the last place ends that is in use. What is behind it has to become zeroes.
    pub(crate) fn cut(&mut self) {
        self.end_bytes = self.free.cut(self.end_bytes, self.len_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_follow_each_other_and_those_given_back_come_first() {
        let mut places = Places::new(100, 10);
        let take = |places: &mut Places| {
            let place = places.take_below(130);
            place.map(|place| (place.start_bytes, place.is_new))
        };
        for start in [100, 110, 120] {
            assert_eq!(take(&mut places), Some((start, true)));
        }
        assert_eq!(take(&mut places), None);
        for start in [120, 100] {
            places.give_back(start);
        }
        assert_eq!(take(&mut places), Some((100, false)));
        places.cut();
        assert_eq!(places.end_bytes(), 120);
        assert_eq!(take(&mut places), Some((120, true)));
        let mut last = Places::new(u64::MAX - 5, 10);
        assert_eq!(last.take_below(u64::MAX), None);
    }
}

//! [`Bits`]: one bit for each grain of a device.

/// The finest grain where nobody asks for another one, in bytes.
pub(super) const MIN_GRAIN_BYTES: u64 = 64 << 10;
/// Larger devices get a coarser grain: bits take 2 MiB at most.
const MAX_GRAINS: u64 = 1 << 24;

/// The grain of a device of this size, `grain_bytes` if it is not too large for that.
pub(super) fn grain_bytes_for(grain_bytes: u64, size_bytes: u64) -> u64 {
    let mut grain_bytes = grain_bytes.max(512);
    while size_bytes.div_ceil(grain_bytes) > MAX_GRAINS {
        grain_bytes *= 2;
    }
    grain_bytes
}

/// Bits for the grains of a device.
#[derive(Debug, Clone)]
pub(super) struct Bits {
    words: Vec<u64>,
    set: u64,
}

impl Bits {
    pub(super) fn none(grains: u64) -> Bits {
        Bits {
            words: vec![0; grains.div_ceil(64) as usize],
            set: 0,
        }
    }

    pub(super) fn set(&mut self, grain: u64) {
        let (word, bit) = ((grain / 64) as usize, 1 << (grain % 64));
        if let Some(word) = self.words.get_mut(word)
            && *word & bit == 0
        {
            *word |= bit;
            self.set += 1;
        }
    }

    pub(super) fn is_set(&self, grain: u64) -> bool {
        let word = self.words.get((grain / 64) as usize);
        word.is_some_and(|word| word >> (grain % 64) & 1 == 1)
    }

    /// Where the grains that are like this one end.
    pub(super) fn run_end(&self, grain: u64, end: u64) -> u64 {
        let dirty = self.is_set(grain);
        let same = if dirty { u64::MAX } else { 0 };
        let mut at = grain + 1;
        while at < end {
            if at.is_multiple_of(64) && self.words.get((at / 64) as usize) == Some(&same) {
                at += 64;
            } else if self.is_set(at) == dirty {
                at += 1;
            } else {
                break;
            }
        }
        at.min(end)
    }

    pub(super) fn clear(&mut self, grain: u64) {
        let (word, bit) = ((grain / 64) as usize, 1 << (grain % 64));
        if let Some(word) = self.words.get_mut(word)
            && *word & bit != 0
        {
            *word &= !bit;
            self.set -= 1;
        }
    }

    /// How many are set.
    pub(super) fn count(&self) -> u64 {
        self.set
    }

    #[cfg(test)]
    pub(super) fn memory_bytes(&self) -> usize {
        self.words.len() * 8
    }
}

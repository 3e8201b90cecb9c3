//! A small generator of random numbers that gives the same for the same seed
//! everywhere and for ever, so that a seed names a scenario.

/// SplitMix64.
#[derive(Debug, Clone)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A generator for one seed.
    pub fn new(seed: u64) -> Self {
        // Neighbouring seeds must not give neighbouring scenarios.
        let mut random = Random {
            state: seed ^ 0x76_656c_6c75_6d00,
        };
        random.next();
        random
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A generator for what runs beside this one.
    pub fn fork(&mut self) -> Self {
        Random::new(self.next())
    }

    /// A number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// `true` in `percent` of 100 cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Fills bytes, a multiple of 4, with noise.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_exact_mut(4) {
            word.copy_from_slice(&(self.below(1 << 32) as u32).to_le_bytes());
        }
    }

    /// One of a few values.
    pub fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        let index = self.below(values.len() as u64);
        // The index is below the length of a slice.
        values[index as usize]
    }
}

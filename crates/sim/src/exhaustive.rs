//! Enumerates every way through a piece of code that makes bounded choices.
//!
//! Code under enumeration asks [`ExhaustiveChoices::below`] for each choice; the caller runs
//! it once per [`ExhaustiveChoices::advance`]. The choices of one run form a number whose
//! digits have the bounds as bases, and `advance` counts up.

#[derive(Debug, Clone, Copy)]
struct Digit {
    value: u64,
    bound: u64,
}

/// A counter over all sequences of choices.
#[derive(Debug, Default)]
pub struct ExhaustiveChoices {
    digits: Vec<Digit>,
    at: usize,
    started: bool,
}

impl ExhaustiveChoices {
    /// A counter before its first sequence.
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves to the next sequence; `false` when all have been seen.
    pub fn advance(&mut self) -> bool {
        self.at = 0;
        if !std::mem::replace(&mut self.started, true) {
            return true;
        }
        while let Some(last) = self.digits.last_mut() {
            last.value += 1;
            if last.value < last.bound {
                return true;
            }
            self.digits.pop();
        }
        false
    }

    /// The choice of this sequence among `bound` possibilities.
    ///
    /// # Panics
    /// If `bound` is 0, or differs from what it was on the way here before.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "a choice among nothing");
        if self.at == self.digits.len() {
            self.digits.push(Digit { value: 0, bound });
        }
        let digit = self.digits[self.at];
        assert_eq!(
            digit.bound, bound,
            "the code under enumeration is not deterministic"
        );
        self.at += 1;
        digit.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sees_every_sequence_once() {
        let mut exhaust = ExhaustiveChoices::new();
        let mut seen = Vec::new();
        while exhaust.advance() {
            let first = exhaust.below(2);
            // A choice that depends on an earlier one.
            let second = exhaust.below(first + 2);
            seen.push((first, second));
        }
        assert_eq!(seen, [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]);
    }

    #[test]
    fn a_run_without_choices_happens_once() {
        let mut exhaust = ExhaustiveChoices::new();
        assert!(exhaust.advance());
        assert!(!exhaust.advance());
    }
}

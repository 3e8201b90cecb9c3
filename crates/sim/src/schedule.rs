//! Which of the requests in flight completes next.

use crate::rng::Rng;

/// What a request is about, as far as a schedule cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// It changes nothing.
    Read,
    /// It changes bytes or the length.
    Write,
    /// A barrier.
    Flush,
}

/// The bias of a schedule: races hide in orders that chance alone rarely makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bias {
    None,
    OldestFirst,
    NewestFirst,
    Last(RequestKind),
}

/// Completes requests in a seeded order.
#[derive(Debug, Clone)]
pub struct Scheduler {
    rng: Rng,
    bias: Bias,
}

impl Scheduler {
    /// The schedule of a seed.
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let bias = match rng.below(8) {
            0 => Bias::OldestFirst,
            1 => Bias::NewestFirst,
            2 => Bias::Last(RequestKind::Read),
            3 => Bias::Last(RequestKind::Write),
            4 => Bias::Last(RequestKind::Flush),
            _ => Bias::None,
        };
        Scheduler { rng, bias }
    }

    /// The place of the next request among those in flight, oldest first.
    pub fn pick(&mut self, in_flight: &[RequestKind]) -> usize {
        let any = self.rng.below(in_flight.len() as u64) as usize;
        if self.rng.chance(1, 8) {
            return any;
        }
        match self.bias {
            Bias::None => any,
            Bias::OldestFirst => 0,
            Bias::NewestFirst => in_flight.len() - 1,
            Bias::Last(kind) => {
                let others = in_flight.iter().filter(|other| **other != kind).count();
                if others == 0 {
                    return any;
                }
                let chosen = self.rng.below(others as u64) as usize;
                let mut places = (0..in_flight.len()).filter(|place| in_flight[*place] != kind);
                places.nth(chosen).unwrap_or(any)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picks_only_what_is_there_and_everything_in_time() {
        let kinds = [RequestKind::Read, RequestKind::Write, RequestKind::Flush];
        for seed in 0..50 {
            let mut scheduler = Scheduler::new(seed);
            let mut seen = [false; 3];
            for _ in 0..200 {
                seen[scheduler.pick(&kinds)] = true;
            }
            assert_eq!(seen, [true; 3], "seed {seed}");
        }
    }
}

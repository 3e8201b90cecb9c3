//! [`Reins`]: what somebody wishes of a job that runs.

use std::sync::Arc;

use event_listener::Event;
use parking_lot::Mutex;

use crate::Speed;

/// What a job is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wish {
    /// Go on.
    #[default]
    Run,
    /// Begin nothing until something else is wished.
    Pause,
    /// Give up. Nothing else can be wished afterwards.
    Cancel,
}

/// Leads a job; a job looks at them whenever it can stop.
#[derive(Debug, Default)]
pub struct Reins {
    wish: Mutex<Wish>,
    speed: Arc<Speed>,
    changed: Event,
}

impl Reins {
    /// Those of a job that is to run.
    pub fn new() -> Self {
        Self::default()
    }

    /// What is wished now.
    pub fn wish(&self) -> Wish {
        *self.wish.lock()
    }

    /// How fast the job may be; as fast as it can, unless somebody has set that.
    pub fn speed(&self) -> &Arc<Speed> {
        &self.speed
    }

    /// Wishes something else.
    pub fn set(&self, wish: Wish) {
        let mut old = self.wish.lock();
        if *old != Wish::Cancel {
            *old = wish;
        }
        drop(old);
        self.changed.notify(usize::MAX);
    }

    /// Waits until what is wished meets a condition.
    pub async fn until(&self, is_met: impl Fn(Wish) -> bool) {
        loop {
            let changed = self.changed.listen();
            if is_met(self.wish()) {
                return;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cancelling_cannot_be_taken_back() {
        let reins = Reins::new();
        reins.set(Wish::Pause);
        reins.set(Wish::Cancel);
        reins.set(Wish::Run);
        assert_eq!(reins.wish(), Wish::Cancel);
        vellum_io::lane::block_on(reins.until(|wish| wish == Wish::Cancel));
    }
}

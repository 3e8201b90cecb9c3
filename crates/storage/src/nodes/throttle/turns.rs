//! [`Turns`]: which of the requests that wait for a group's limits is next, and when. Pure: moments
//! are given.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use event_listener::Event;

use super::buckets::{Buckets, Direction, ThrottleLimits};

/// A request that waits.
#[derive(Debug)]
struct Waiting {
    ticket: u64,
    /// Notified when its turn comes.
    turn: Arc<Event>,
}

/// The requests of one direction.
#[derive(Debug, Default)]
struct Line {
    /// The members that have some, in the order of their turns.
    members: VecDeque<u64>,
    /// By member, in the order in which they came; never empty.
    waiting: BTreeMap<u64, VecDeque<Waiting>>,
}

impl Line {
    fn first(&self) -> Option<&Waiting> {
        let member = self.members.front()?;
        self.waiting.get(member)?.front()
    }

    fn push(&mut self, member: u64, waiting: Waiting) {
        let own = self.waiting.entry(member).or_default();
        if own.is_empty() {
            self.members.push_back(member);
        }
        own.push_back(waiting);
    }

    /// Takes a request out. One whose turn it was gives the turn to the next member.
    fn remove(&mut self, member: u64, ticket: u64) {
        let had_turn = self.first().is_some_and(|first| first.ticket == ticket);
        let Some(own) = self.waiting.get_mut(&member) else {
            return;
        };
        own.retain(|waiting| waiting.ticket != ticket);
        let is_empty = own.is_empty();
        if is_empty {
            self.waiting.remove(&member);
            self.members.retain(|other| *other != member);
        } else if had_turn {
            self.members.rotate_left(1);
        }
    }
}

/// What comes of an attempt.
#[derive(Debug)]
pub(super) enum Admission {
    /// The request goes, and is counted; whoever this is comes next.
    Admitted(Option<Arc<Event>>),
    /// It is not its turn.
    Behind,
    /// It is its turn, but the limits are reached for so long.
    Wait(Duration),
}

/// A group's limits and those who wait for them.
#[derive(Debug)]
pub(super) struct Turns {
    buckets: Buckets,
    lines: [Line; 2],
    next_ticket: u64,
}

impl Turns {
    pub(super) fn new(limits: ThrottleLimits) -> Self {
        Turns {
            buckets: Buckets::new(limits),
            lines: Default::default(),
            next_ticket: 0,
        }
    }

    /// Changes the limits; what was counted under the old ones is forgotten. Those who look at
    /// the limits have to look again.
    pub(super) fn set_limits(&mut self, limits: ThrottleLimits) -> Vec<Arc<Event>> {
        self.buckets = Buckets::new(limits);
        let first = |line: &Line| line.first().map(|first| first.turn.clone());
        self.lines.iter().filter_map(first).collect()
    }

    /// Whether a request that has just come can go at once; then it is counted.
    pub(super) fn try_pass(&mut self, direction: Direction, len_bytes: u64, now: Instant) -> bool {
        let passes = self.lines[direction as usize].members.is_empty()
            && self.buckets.wait(direction, now).is_none();
        if passes {
            self.buckets.count(direction, len_bytes);
        }
        passes
    }

    /// Counts a request that does not care about the limits.
    pub(super) fn count(&mut self, direction: Direction, len_bytes: u64) {
        self.buckets.count(direction, len_bytes);
    }

    /// Has a request wait; its ticket.
    pub(super) fn queue(&mut self, member: u64, direction: Direction, turn: Arc<Event>) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.lines[direction as usize].push(member, Waiting { ticket, turn });
        ticket
    }

    /// Looks whether a waiting request can go; then it does not wait any more.
    pub(super) fn attempt(
        &mut self,
        (member, direction, ticket): (u64, Direction, u64),
        len_bytes: u64,
        now: Instant,
    ) -> Admission {
        let line = &self.lines[direction as usize];
        if line.first().is_none_or(|first| first.ticket != ticket) {
            return Admission::Behind;
        }
        match self.buckets.wait(direction, now) {
            Some(time) => Admission::Wait(time),
            None => {
                self.buckets.count(direction, len_bytes);
                Admission::Admitted(self.remove((member, direction, ticket)))
            }
        }
    }

    /// Forgets a waiting request; whoever this is comes next.
    pub(super) fn remove(
        &mut self,
        (member, direction, ticket): (u64, Direction, u64),
    ) -> Option<Arc<Event>> {
        let line = &mut self.lines[direction as usize];
        line.remove(member, ticket);
        line.first().map(|first| first.turn.clone())
    }

    /// All requests of a member that wait.
    pub(super) fn of_member(&self, member: u64) -> Vec<Arc<Event>> {
        let own = self
            .lines
            .iter()
            .filter_map(|line| line.waiting.get(&member));
        own.flatten().map(|waiting| waiting.turn.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::buckets::Limit;
    use super::*;

    /// Members with so many requests each, and the order in which they go, with the time.
    fn play(limits: ThrottleLimits, members: &[usize]) -> Vec<(u64, Duration)> {
        let mut turns = Turns::new(limits);
        let start = Instant::now();
        let mut now = start;
        let mut waiting = Vec::new();
        for (member, count) in members.iter().enumerate() {
            for _ in 0..*count {
                let turn = Arc::new(Event::new());
                let ticket = turns.queue(member as u64, Direction::Read, turn);
                waiting.push((member as u64, Direction::Read, ticket));
            }
        }
        let mut went = Vec::new();
        while !waiting.is_empty() {
            let mut pause = None;
            let before = waiting.len();
            waiting.retain(|place| match turns.attempt(*place, 1, now) {
                Admission::Admitted(_) => {
                    went.push((place.0, now - start));
                    false
                }
                Admission::Behind => true,
                Admission::Wait(time) => {
                    pause = Some(time);
                    true
                }
            });
            match pause {
                Some(time) => now += time,
                None => assert!(waiting.len() < before, "somebody's turn must be"),
            }
        }
        went
    }

    #[test]
    fn members_take_turns() {
        let limits = ThrottleLimits {
            iops_total: Limit::rate(10),
            ..ThrottleLimits::NONE
        };
        let went = play(limits, &[6, 2, 1]);
        let order: Vec<u64> = went.iter().map(|(member, _)| *member).collect();
        assert_eq!(order, [0, 1, 2, 0, 1, 0, 0, 0, 0]);
        // One fits above the first one; then there are ten a second.
        let last = went.last().unwrap().1;
        let close = |a: Duration, b: Duration| a.abs_diff(b) < Duration::from_millis(1);
        assert!(close(last, Duration::from_millis(700)), "{last:?}");
    }

    #[test]
    fn who_leaves_gives_the_turn_away() {
        let limits = ThrottleLimits {
            iops_total: Limit::rate(1),
            ..ThrottleLimits::NONE
        };
        let mut turns = Turns::new(limits);
        let now = Instant::now();
        let mut queue = |member| {
            let ticket = turns.queue(member, Direction::Write, Arc::new(Event::new()));
            (member, Direction::Write, ticket)
        };
        let (first, second, other) = (queue(1), queue(1), queue(2));
        assert!(matches!(turns.attempt(second, 1, now), Admission::Behind));
        assert!(turns.remove(first).is_some());
        assert!(matches!(turns.attempt(second, 1, now), Admission::Behind));
        assert!(matches!(
            turns.attempt(other, 1, now),
            Admission::Admitted(Some(_))
        ));
        assert!(matches!(turns.attempt(second, 1, now), Admission::Wait(_)));
        assert!(!turns.try_pass(Direction::Write, 1, now));
        assert!(turns.remove(second).is_none());
    }

    #[test]
    fn what_was_counted_before_new_limits_is_forgotten() {
        let limits = ThrottleLimits {
            bps_total: Limit::rate(1000),
            ..ThrottleLimits::NONE
        };
        let mut turns = Turns::new(limits);
        let now = Instant::now();
        assert!(turns.try_pass(Direction::Read, 100_000, now));
        assert!(!turns.try_pass(Direction::Read, 1, now));
        turns.set_limits(limits);
        assert!(turns.try_pass(Direction::Read, 1, now));
    }
}

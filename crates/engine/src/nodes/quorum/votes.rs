//! Who agrees with whom.

use vellum_io::{Buffer, Error, Result};

/// What the children have answered to a read.
#[derive(Debug)]
pub(super) struct Ballot {
    answers: Vec<Result<Buffer>>,
    /// The first of those that hold what most do.
    winner: Option<usize>,
    votes: usize,
}

impl Ballot {
    pub(super) fn new(answers: Vec<Result<Buffer>>) -> Ballot {
        let (mut winner, mut votes) = (None, 0);
        for (child, answer) in answers.iter().enumerate() {
            let Ok(bytes) = answer else { continue };
            let alike = answers.iter().flatten();
            let count = alike.filter(|other| ***other == **bytes).count();
            if count > votes {
                (winner, votes) = (Some(child), count);
            }
        }
        Ballot {
            answers,
            winner,
            votes,
        }
    }

    /// How many could be read.
    pub(super) fn read(&self) -> usize {
        self.answers.iter().flatten().count()
    }

    /// How many hold what most do.
    pub(super) fn votes(&self) -> usize {
        self.votes
    }

    /// Those that could not be read.
    pub(super) fn failures(&self) -> impl Iterator<Item = (usize, &Error)> {
        let all = self.answers.iter().enumerate();
        all.filter_map(|(child, answer)| answer.as_ref().err().map(|error| (child, error)))
    }

    /// Those that hold something else.
    pub(super) fn outvoted(&self) -> Vec<usize> {
        let Some(Ok(winner)) = self.winner.map(|child| &self.answers[child]) else {
            return Vec::new();
        };
        let all = self.answers.iter().enumerate();
        let differ = all.filter(|(_, answer)| {
            let bytes = answer.as_ref().ok();
            bytes.is_some_and(|bytes| **bytes != **winner)
        });
        differ.map(|(child, _)| child).collect()
    }

    /// What most hold.
    ///
    /// # Panics
    /// If nothing could be read.
    pub(super) fn into_winner(mut self) -> Buffer {
        let winner = self.winner.map(|child| self.answers.swap_remove(child));
        match winner {
            Some(Ok(bytes)) => bytes,
            _ => unreachable!("only asked for where something was agreed on"),
        }
    }

    /// Why most could not be read.
    pub(super) fn into_failure(self) -> Error {
        most_common(self.answers.into_iter().filter_map(Result::err).collect())
    }
}

/// The failure that most children have met: the first of them.
///
/// # Panics
/// If there is none.
pub(super) fn most_common(failures: Vec<Error>) -> Error {
    let count = |of: &Error| {
        let alike = failures.iter().filter(|other| other.kind() == of.kind());
        alike.count()
    };
    let most = failures.iter().map(count).max();
    let found = failures.iter().position(|it| Some(count(it)) == most);
    match found.and_then(|at| failures.into_iter().nth(at)) {
        Some(error) => error,
        None => unreachable!("something has failed"),
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::ErrorKind;

    use super::*;

    fn bytes(byte: u8) -> Result<Buffer> {
        Ok(Buffer::copy_of(&[byte; 8]))
    }

    fn failed(kind: ErrorKind) -> Result<Buffer> {
        Err(Error::new(kind, "read", "failed"))
    }

    #[test]
    fn what_most_hold_wins_and_of_equals_the_first() {
        let ballot = Ballot::new(vec![bytes(1), bytes(2), failed(ErrorKind::Io), bytes(2)]);
        assert_eq!((ballot.read(), ballot.votes()), (3, 2));
        assert_eq!(ballot.outvoted(), [0]);
        let failures: Vec<usize> = ballot.failures().map(|(child, _)| child).collect();
        assert_eq!(failures, [2]);
        assert_eq!(ballot.into_winner()[0], 2);
        let even = Ballot::new(vec![bytes(3), bytes(4)]);
        assert_eq!((even.votes(), even.outvoted()), (1, vec![1]));
        assert_eq!(even.into_winner()[0], 3);
    }

    #[test]
    fn the_failure_that_most_have_met_is_told() {
        let kinds = [ErrorKind::Corrupt, ErrorKind::NoSpace, ErrorKind::NoSpace];
        let ballot = Ballot::new(kinds.map(failed).into());
        assert_eq!((ballot.read(), ballot.votes()), (0, 0));
        assert_eq!(ballot.into_failure().kind(), ErrorKind::NoSpace);
    }
}

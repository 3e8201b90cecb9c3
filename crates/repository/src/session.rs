//! Sessions: each push says that it runs, which number of which tag it is for, and who does it.
//!
//! Invariants:
//! - A session is there before its push looks at what the repository holds, and until its manifest is.
//!   So whoever removes objects knows all pushes that may lead to them.
//! - A manifest comes under the number of its session or not at all: whoever gives a session up takes
//!   that number first, with a tombstone.

use serde::{Deserialize, Serialize};
use vellum_io::{Error, ErrorKind, Result};

use crate::codec::PushId;
use crate::codec::manifest::{Entry, Tombstone, TombstoneKind};
use crate::holder::Holder;
use crate::names::{self, TagName};
use crate::repository::Repository;

/// More bytes than a session can have.
const MOST_BYTES: u64 = 64 << 10;
/// How often a push looks for a number before it gives up.
const TRIES: usize = 16;

/// A push that runs, or was killed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Session {
    pub(crate) push: PushId,
    pub(crate) tag: TagName,
    pub(crate) number: u64,
    pub(crate) holder: Holder,
}

/// A session, and when its push last said that it runs.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) session: Session,
    pub(crate) changed_seconds: u64,
}

/// A session that was begun, and those of killed pushes that it goes on for.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) session: Session,
    pub(crate) resumed: Vec<Session>,
}

impl Begun {
    /// Says that the push runs, also for those that it goes on for: whoever gives one of them up takes
    /// the number that it is for, too.
    ///
    /// # Errors
    /// What the store says.
    pub(crate) async fn say(&self, repository: &Repository) -> Result<()> {
        for session in std::iter::once(&self.session).chain(&self.resumed) {
            session.say(repository).await?;
        }
        Ok(())
    }
}

impl Session {
    fn encode(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|error| {
            let message = format!("cannot write a session: {error}");
            Error::new(ErrorKind::Io, "write", message)
        })
    }

    /// Says that the push runs.
    pub(crate) async fn say(&self, repository: &Repository) -> Result<()> {
        let key = names::session(self.push);
        repository.objects().put(&key, self.encode()?).await
    }

    pub(crate) async fn remove(&self, repository: &Repository) -> Result<()> {
        let key = names::session(self.push);
        repository.objects().remove(&key).await
    }
}

/// All sessions.
///
/// # Errors
/// What the store says. What is no session is nobody's.
pub(crate) async fn all(repository: &Repository) -> Result<Vec<Found>> {
    let listed = repository.objects().list(names::SESSIONS).await?;
    let mut found = Vec::new();
    for object in listed {
        // What is no session is nobody's.
        if object.len_bytes > MOST_BYTES {
            continue;
        }
        let content = repository.objects().get(&object.key, MOST_BYTES).await;
        let content = match content {
            Ok(content) => content,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        if let Ok(session) = serde_json::from_slice::<Session>(&content) {
            let changed_seconds = object.changed_seconds;
            found.push(Found {
                session,
                changed_seconds,
            });
        }
    }
    Ok(found)
}

/// Begins a session of `push` for the next number of a tag. `take_over`: another one of the tag is known
/// to have ended.
///
/// # Errors
/// [`ErrorKind::Locked`] if another push to the tag runs.
pub(crate) async fn begin(
    repository: &Repository,
    tag: &TagName,
    push: PushId,
    holder: &Holder,
    take_over: bool,
) -> Result<Begun> {
    for _ in 0..TRIES {
        let number = next_number(repository, tag).await?;
        if number > names::MOST_NUMBER {
            let message = format!("the tag '{tag}' has no more numbers: push to another one");
            return Err(Error::new(ErrorKind::Unsupported, "push", message));
        }
        let mut resumed = Vec::new();
        for Found { session, .. } in all(repository).await? {
            match session {
                other if other.tag != *tag || other.push == push => {}
                // It has ended, or nothing can come of it.
                other if other.number < number => other.remove(repository).await?,
                other if take_over || other.holder.is_gone() => resumed.push(other),
                other => return Err(runs(repository, &other)),
            }
        }
        let session = Session {
            push,
            tag: tag.clone(),
            number,
            holder: holder.clone(),
        };
        let begun = Begun { session, resumed };
        begun.say(repository).await?;
        let Begun { session, resumed } = begun;
        if next_number(repository, tag).await? != number {
            continue;
        }
        // Of two that have begun at once one goes on.
        let others = all(repository)
            .await?
            .into_iter()
            .map(|found| found.session);
        let mut others = others.filter(|other| {
            let same = other.tag == *tag && other.number == number && other.push < push;
            same && !resumed.iter().any(|known| known.push == other.push)
        });
        if let Some(other) = others.next() {
            session.remove(repository).await?;
            return Err(runs(repository, &other));
        }
        return Ok(Begun { session, resumed });
    }
    let message = format!("others push to '{tag}' all the time");
    Err(Error::new(ErrorKind::Locked, "push", message).target(repository.name()))
}

async fn next_number(repository: &Repository, tag: &TagName) -> Result<u64> {
    let numbers = repository.numbers_of(tag).await?;
    Ok(numbers.last().map_or(1, |last| last.saturating_add(1)))
}

fn runs(repository: &Repository, other: &Session) -> Error {
    let Session { tag, holder, .. } = other;
    let message = format!(
        "another push to '{tag}' runs ({}): wait until it has ended; if it is known to have been \
         killed, --take-over goes on where it was",
        holder.told()
    );
    Error::new(ErrorKind::Locked, "push", message).target(repository.name())
}

/// Gives a session up: its push can put no manifest any more, unless it has done so.
///
/// # Errors
/// What the store says; the session is there still.
pub(crate) async fn give_up(repository: &Repository, session: &Session, why: &str) -> Result<()> {
    if repository
        .numbers_of(&session.tag)
        .await?
        .contains(&session.number)
    {
        // It has done so, and was killed before it could say that it has ended.
        return session.remove(repository).await;
    }
    let tombstone = Entry::Tombstone(Tombstone {
        kind: TombstoneKind::Void,
        why: why.to_owned(),
    });
    let key = names::entry(&session.tag, session.number);
    repository
        .objects()
        .put_new(&key, tombstone.encode()?)
        .await?;
    session.remove(repository).await
}

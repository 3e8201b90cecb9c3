//! The lock of those who remove something: one at a time.

use vellum_io::{Error, ErrorKind, Result};

use crate::holder::Holder;
use crate::names;
use crate::repository::Repository;

/// More bytes than a lock can have.
const MOST_BYTES: u64 = 64 << 10;

/// The lock, until it is given back. One that is dropped stays in the store until somebody finds that its
/// holder is gone; that keeps nobody from pushing and reading.
#[derive(Debug)]
pub(crate) struct Lock<'a> {
    repository: &'a Repository,
    /// Now, by the store's clock.
    pub(crate) now_seconds: u64,
}

impl<'a> Lock<'a> {
    /// Takes the lock.
    ///
    /// # Errors
    /// [`ErrorKind::Locked`] if another one has it; as of [`Repository::check_store`]: without conditions nobody would
    /// know that another one has it, and whoever removes something would put tombstones over disks.
    pub(crate) async fn take(
        repository: &'a Repository,
        holder: &Holder,
        break_lock: bool,
    ) -> Result<Lock<'a>> {
        let content = serde_json::to_vec(holder).map_err(|error| {
            let message = format!("cannot write a lock: {error}");
            Error::new(ErrorKind::Io, "lock", message)
        })?;
        repository.check_store().await?;
        let objects = repository.objects();
        if !objects.put_new(names::LOCK, content.clone()).await? {
            let found = match objects.get(names::LOCK, MOST_BYTES).await {
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                found => Some(found?),
            };
            let other = found.as_ref();
            let other = other.and_then(|other| serde_json::from_slice::<Holder>(other).ok());
            let is_own = other.as_ref() == Some(holder);
            // A lock that cannot be understood has a holder of another version.
            let is_gone = match &other {
                Some(other) => other.is_gone(),
                None => found.is_none(),
            };
            if !(break_lock || is_own || is_gone) {
                let who = other.map_or_else(String::new, |other| format!(" ({})", other.told()));
                let message = format!(
                    "somebody removes disks or objects there already{who}; if that is known to have \
                     been killed, use --break-lock"
                );
                let error = Error::new(ErrorKind::Locked, "lock", message);
                return Err(error.target(repository.name()));
            }
            objects.put(names::LOCK, content).await?;
        }
        Ok(Lock {
            repository,
            now_seconds: changed_seconds(repository).await?,
        })
    }

    /// Gives it back.
    pub(crate) async fn give_back(self) {
        // What stays is found to be without a holder.
        let _ = self.repository.objects().remove(names::LOCK).await;
    }
}

/// When the lock was taken, by the store's clock.
async fn changed_seconds(repository: &Repository) -> Result<u64> {
    let listed = repository.objects().list(names::LOCKS).await?;
    let lock = listed.into_iter().find(|object| object.key == names::LOCK);
    Ok(lock.map_or(0, |lock| lock.changed_seconds))
}

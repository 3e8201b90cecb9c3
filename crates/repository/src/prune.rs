//! Removes disks. What they alone led to is removed by [`crate::gc()`].

use std::time::Duration;

use vellum_io::{Error, ErrorKind, Result};

use crate::clock::local_seconds;
use crate::codec::manifest::{Entry, Manifest, Tombstone, TombstoneKind};
use crate::holder::Holder;
use crate::lock::Lock;
use crate::names::{self, TAGS, TagName};
use crate::repository::Repository;

/// Tombstones are removed after this time: no request is under way for so long.
const TOMBSTONE_SECONDS: u64 = 30 * 24 * 3600;

/// Which disks stay.
#[derive(Debug, Clone, Default)]
pub struct Keep {
    /// The newest of each tag.
    pub newest: Option<u64>,
    /// Those that are younger.
    pub within: Option<Duration>,
}

/// How disks are removed.
#[derive(Debug, Clone)]
pub struct PruneOptions {
    /// Of this tag alone.
    pub tag: Option<TagName>,
    /// Another call that has the lock is known to be dead.
    pub break_lock: bool,
    /// Nothing is removed.
    pub dry_run: bool,
    /// Who does it.
    pub holder: Holder,
}

impl Default for PruneOptions {
    fn default() -> Self {
        PruneOptions {
            tag: None,
            break_lock: false,
            dry_run: false,
            holder: Holder::this_process(),
        }
    }
}

/// Removes all disks but those that `keep` says, and the newest one of each tag. Says which.
///
/// # Errors
/// [`ErrorKind::Locked`] if another call runs, [`ErrorKind::InvalidArgument`] if nothing is to be kept.
pub async fn prune(
    repository: &Repository,
    keep: &Keep,
    options: &PruneOptions,
) -> Result<Vec<Manifest>> {
    if keep.newest.is_none() && keep.within.is_none() {
        let message = "say which disks stay (--keep or --keep-within)";
        return Err(Error::new(ErrorKind::InvalidArgument, "prune", message));
    }
    if options.dry_run {
        return prune_locked(repository, keep, options, 0).await;
    }
    let lock = Lock::take(repository, &options.holder, options.break_lock).await?;
    let pruned = prune_locked(repository, keep, options, lock.now_seconds).await;
    lock.give_back().await;
    pruned
}

async fn prune_locked(
    repository: &Repository,
    keep: &Keep,
    options: &PruneOptions,
    store_seconds: u64,
) -> Result<Vec<Manifest>> {
    let mut disks = Vec::<Manifest>::new();
    repository
        .each_entry(|tag, _, entry| {
            // Newest first, and what is damaged stays for people to look at.
            if let Ok(Entry::Manifest(manifest)) = entry
                && options.tag.as_ref().is_none_or(|only| only == tag)
            {
                disks.push(*manifest);
            }
            Ok(())
        })
        .await?;
    let now = local_seconds();
    let mut pruned = Vec::new();
    let mut seen: Option<(TagName, u64)> = None;
    for disk in disks {
        let before = match &seen {
            Some((tag, count)) if *tag == disk.tag => *count,
            _ => 0,
        };
        seen = Some((disk.tag.clone(), before + 1));
        let is_young =
            |within: Duration| now.saturating_sub(disk.created_seconds) <= within.as_secs();
        let stays = before == 0
            || keep.newest.is_some_and(|newest| before < newest)
            || keep.within.is_some_and(is_young);
        if !stays {
            pruned.push(disk);
        }
    }
    if !options.dry_run {
        finish_removals(repository).await?;
        for disk in &pruned {
            bury(repository, &disk.tag, disk.number).await?;
        }
        remove_old_tombstones(repository, store_seconds).await?;
    }
    Ok(pruned)
}

/// Does what is left of removals of tags that were killed: what is below their tombstones is not seen, and
/// must not be when these go.
async fn finish_removals(repository: &Repository) -> Result<()> {
    let mut left = Vec::new();
    repository
        .each_entry_and_hidden(|tag, number, entry, counts| {
            // What is damaged there counts no more than the rest.
            if !counts && !matches!(entry, Ok(Entry::Tombstone(_))) {
                left.push((tag.clone(), number));
            }
            Ok(())
        })
        .await?;
    for (tag, number) in left {
        bury(repository, &tag, number).await?;
    }
    Ok(())
}

/// Puts a tombstone in the place of a disk.
async fn bury(repository: &Repository, tag: &TagName, number: u64) -> Result<()> {
    let tombstone = Entry::Tombstone(Tombstone {
        kind: TombstoneKind::Pruned,
        why: "pruned".to_owned(),
    });
    let key = names::entry(tag, number);
    repository.objects().put(&key, tombstone.encode()?).await
}

/// Removes a tag with all of its disks. A push to it that runs fails.
///
/// # Errors
/// [`ErrorKind::NotFound`] if there is no such tag; as of [`prune`].
pub async fn remove_tag(
    repository: &Repository,
    tag: &TagName,
    options: &PruneOptions,
) -> Result<u64> {
    if options.dry_run {
        return remove_tag_locked(repository, tag, true).await;
    }
    let lock = Lock::take(repository, &options.holder, options.break_lock).await?;
    let removed = remove_tag_locked(repository, tag, false).await;
    lock.give_back().await;
    removed
}

async fn remove_tag_locked(repository: &Repository, tag: &TagName, dry_run: bool) -> Result<u64> {
    loop {
        let numbers = repository.numbers_of(tag).await?;
        let (mut disks, mut hidden, mut is_removed) = (Vec::new(), Vec::new(), false);
        for &number in numbers.iter().rev() {
            match repository.entry(tag, number).await {
                Ok(Some(Entry::Tombstone(there))) => {
                    is_removed |= there.kind == TombstoneKind::Removed;
                }
                Ok(None) => {}
                // A removal that was killed has left it.
                _ if is_removed => hidden.push(number),
                // Also what is damaged: there is no other way to get rid of it.
                Ok(Some(Entry::Manifest(_))) => disks.push(number),
                Err(error) if error.kind() == ErrorKind::Corrupt => disks.push(number),
                Err(error) => return Err(error),
            }
        }
        if disks.is_empty() && hidden.is_empty() {
            let message = format!("there is no disk of the tag '{tag}'");
            return Err(
                Error::new(ErrorKind::NotFound, "remove", message).target(repository.name())
            );
        }
        if dry_run {
            return Ok(disks.len() as u64);
        }
        if !disks.is_empty() {
            let next = numbers.last().map_or(1, |last| last + 1);
            if next > names::MOST_NUMBER {
                let message =
                    format!("the tag '{tag}' has no more numbers: remove '{TAGS}{tag}/' by hand");
                return Err(Error::new(ErrorKind::Unsupported, "remove", message));
            }
            let tombstone = Entry::Tombstone(Tombstone {
                kind: TombstoneKind::Removed,
                why: "the tag was removed".to_owned(),
            });
            let objects = repository.objects();
            let key = names::entry(tag, next);
            // If a push has come first, its disk is to go, too.
            if !objects.put_new(&key, tombstone.encode()?).await? {
                continue;
            }
        }
        for &number in disks.iter().chain(&hidden) {
            bury(repository, tag, number).await?;
        }
        return Ok(disks.len() as u64);
    }
}

/// Removes tombstones that nothing needs any more: never the last number of a tag, from which the next
/// one is told.
async fn remove_old_tombstones(repository: &Repository, now_seconds: u64) -> Result<()> {
    let mut listed = repository.objects().list(names::TAGS).await?;
    listed.sort_unstable_by(|a, b| a.key.cmp(&b.key));
    let mut old = Vec::new();
    for pair in listed.windows(2) {
        let [object, next] = pair else { continue };
        let (Some((tag, number)), Some((next, _))) = (
            names::parse_entry(&object.key),
            names::parse_entry(&next.key),
        ) else {
            continue;
        };
        let is_old = now_seconds.saturating_sub(object.changed_seconds) > TOMBSTONE_SECONDS;
        if tag != next || !is_old {
            continue;
        }
        if let Ok(Some(Entry::Tombstone(_))) = repository.entry(&tag, number).await {
            old.push(object.key.clone());
        }
    }
    repository.remove_all(old).await
}

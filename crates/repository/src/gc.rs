//! Removes objects that no manifest leads to.
//!
//! A push may lead to any segment that a manifest led to when it looked, which is after its session was
//! there. So in this order:
//!
//! 1. list all segments, maps and lists: only these may be removed;
//! 2. read all manifests;
//! 3. list all sessions: of pushes that may have seen manifests which are not there any more;
//! 4. read the manifests again: of pushes that have ended in between.
//!
//! What no manifest leads to is removed at once if there is no session, and otherwise noted, and removed
//! by a later call when none of these sessions is there any more and still no manifest leads to it.
//! What has begun after step 3 can lead to none of it: no manifest does. Nobody else removes manifests
//! meanwhile (the lock), and names are never used again, so that a call which was thought to be dead
//! does no harm when it goes on.

use std::collections::HashSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vellum_io::{Error, ErrorKind, Result};

use crate::clock::local_seconds;
use crate::codec::{PushId, from_hex};
use crate::holder::Holder;
use crate::lock::Lock;
use crate::names;
use crate::objects::ObjectInfo;
use crate::repository::{Repository, Used};
use crate::session::{self, Found};
use crate::sound;

/// More bytes than a note can have.
const MOST_NOTE_BYTES: u64 = 256 << 20;

/// How objects are removed.
#[derive(Debug, Clone)]
pub struct GcOptions {
    /// Pushes that have given no sign of life for so long are given up; those whose process is known to have ended at
    /// once.
    pub stale: Duration,
    /// Another call that has the lock is known to be dead.
    pub break_lock: bool,
    /// Nothing is removed.
    pub dry_run: bool,
    /// Who does it.
    pub holder: Holder,
}

impl Default for GcOptions {
    /// Pushes are given up after a day.
    fn default() -> Self {
        GcOptions {
            stale: Duration::from_secs(24 * 3600),
            break_lock: false,
            dry_run: false,
            holder: Holder::this_process(),
        }
    }
}

/// What was removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Collected {
    /// Objects that were removed.
    pub removed: u64,
    /// Their bytes.
    pub removed_bytes: u64,
    /// Objects that are kept until the pushes have ended that run.
    pub waiting: u64,
    /// Pushes that were given up.
    pub given_up: u64,
}

/// What is to be removed when pushes have ended.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Note {
    sessions: Vec<PushId>,
    keys: Vec<String>,
}

/// Removes what no manifest leads to, as far as no push that runs may.
///
/// # Errors
/// [`ErrorKind::Locked`] if another call runs; [`ErrorKind::Corrupt`] if a manifest cannot be read, since
/// nobody knows what it leads to; what the store says.
pub async fn gc(repository: &Repository, options: &GcOptions) -> Result<Collected> {
    if options.dry_run {
        // Whoever may only read can ask, too; by the clock of this machine.
        return collect(repository, options, local_seconds()).await;
    }
    let lock = Lock::take(repository, &options.holder, options.break_lock).await?;
    let collected = collect(repository, options, lock.now_seconds).await;
    let forgotten = match &collected {
        Ok(_) => sound::forget_removed(repository).await,
        Err(_) => Ok(()),
    };
    lock.give_back().await;
    forgotten.and(collected)
}

async fn collect(
    repository: &Repository,
    options: &GcOptions,
    now_seconds: u64,
) -> Result<Collected> {
    let objects = repository.objects();
    let mut collected = Collected::default();
    let mut listed = Vec::new();
    for folder in [names::SEGMENTS, names::MAPS, names::INDEXES] {
        listed.extend(objects.list(folder).await?);
    }
    let mut notes = objects.list(names::GARBAGE).await?;
    // Others are nobody's.
    notes.retain(|note| is_note(&note.key));
    let before = repository.used().await?;
    let running = running(repository, options, now_seconds, &mut collected).await?;
    let after = repository.used().await?;
    let is_used = |key: &str| is_used(&before, key) || is_used(&after, key);
    let (mut dead, mut ended_notes) = (Vec::new(), Vec::new());
    let mut noted = HashSet::new();
    for note in notes {
        let (ended, keys) = read_note(repository, &note.key, &running).await?;
        let keys = keys.into_iter().filter(|key| !is_used(key));
        match ended {
            true => {
                dead.extend(listed_of(&listed, keys));
                ended_notes.push(note.key);
            }
            false => noted.extend(keys),
        }
    }
    let is_of_running = |key: &str| owner(key).is_none_or(|push| running.contains(&push));
    let unused = listed
        .iter()
        .filter(|object| !is_used(&object.key) && !is_of_running(&object.key));
    let unused = unused.cloned().collect::<Vec<_>>();
    collected.waiting = noted.len() as u64;
    if running.is_empty() {
        dead.extend(unused);
    } else {
        let new = unused.iter().filter(|object| !noted.contains(&object.key));
        let keys = new.map(|object| object.key.clone()).collect::<Vec<_>>();
        let ended = dead
            .iter()
            .map(|object| &object.key)
            .collect::<HashSet<_>>();
        let keys = keys
            .into_iter()
            .filter(|key| !ended.contains(key))
            .collect::<Vec<_>>();
        collected.waiting += keys.len() as u64;
        if !keys.is_empty() && !options.dry_run {
            write_note(repository, &running, keys).await?;
        }
    }
    dead.sort_unstable_by(|a, b| a.key.cmp(&b.key));
    dead.dedup_by(|a, b| a.key == b.key);
    collected.removed = dead.len() as u64;
    collected.removed_bytes = dead.iter().map(|object| object.len_bytes).sum();
    if !options.dry_run {
        repository
            .remove_all(dead.into_iter().map(|object| object.key).collect())
            .await?;
        repository.remove_all(ended_notes).await?;
        objects.remove_unfinished(options.stale).await?;
    }
    Ok(collected)
}

/// The pushes that run; those whose process is known to be gone, or that give no sign of life, are given up.
async fn running(
    repository: &Repository,
    options: &GcOptions,
    now_seconds: u64,
    collected: &mut Collected,
) -> Result<HashSet<PushId>> {
    let mut running = HashSet::new();
    let sessions = session::all(repository).await?;
    for found in &sessions {
        let silent = now_seconds.saturating_sub(found.changed_seconds);
        let is_gone = found.session.holder.is_gone() && !is_gone_on_with(found, &sessions);
        let why = match (is_gone, silent <= options.stale.as_secs()) {
            (true, _) => "its process had ended".to_owned(),
            (false, true) => {
                running.insert(found.session.push);
                continue;
            }
            (false, false) => format!("it had given no sign of life for {silent} seconds"),
        };
        if !options.dry_run {
            session::give_up(repository, &found.session, &why).await?;
            collected.given_up += 1;
        }
    }
    Ok(running)
}

/// Whether another push goes on for this one, and is lost with it: that one is for the same number. One that begins to
/// just now fails, since the number is taken.
fn is_gone_on_with(gone: &Found, sessions: &[Found]) -> bool {
    sessions.iter().any(|other| {
        let (gone, other) = (&gone.session, &other.session);
        let is_same = (&gone.tag, gone.number) == (&other.tag, other.number);
        is_same && other.push != gone.push && !other.holder.is_gone()
    })
}

fn is_note(key: &str) -> bool {
    let name = key.strip_prefix(names::GARBAGE);
    name.is_some_and(|name| from_hex::<32>(name).is_some())
}

/// Whose an object is.
fn owner(key: &str) -> Option<PushId> {
    let folders = [names::SEGMENTS, names::MAPS, names::INDEXES];
    let mut parts = folders
        .into_iter()
        .filter_map(|folder| names::parse_part(folder, key));
    parts.next().map(|(push, _)| push)
}

fn is_used(used: &Used, key: &str) -> bool {
    match names::parse_part(names::SEGMENTS, key) {
        Some((push, number)) => used.has_segment(push, number),
        // A push has few of the others, and they are small.
        None => owner(key).is_none_or(|push| used.pushes.contains(&push)),
    }
}

fn listed_of(listed: &[ObjectInfo], keys: impl Iterator<Item = String>) -> Vec<ObjectInfo> {
    let keys = keys.collect::<HashSet<_>>();
    listed
        .iter()
        .filter(|object| keys.contains(&object.key))
        .cloned()
        .collect()
}

/// Whether all pushes of a note have ended, and what it is about.
async fn read_note(
    repository: &Repository,
    key: &str,
    running: &HashSet<PushId>,
) -> Result<(bool, Vec<String>)> {
    let content = match repository.objects().get(key, MOST_NOTE_BYTES).await {
        Ok(content) => content,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok((true, Vec::new())),
        Err(error) => return Err(error),
    };
    // What cannot be read is found to be unused again.
    let Ok(Note { sessions, keys }) = serde_json::from_slice(&content) else {
        return Ok((true, Vec::new()));
    };
    let ended = !sessions.iter().any(|session| running.contains(session));
    Ok((
        ended,
        keys.into_iter()
            .filter(|key| owner(key).is_some())
            .collect(),
    ))
}

async fn write_note(
    repository: &Repository,
    running: &HashSet<PushId>,
    keys: Vec<String>,
) -> Result<()> {
    let note = Note {
        sessions: running.iter().copied().collect(),
        keys,
    };
    let content = serde_json::to_vec(&note).map_err(|error| {
        let message = format!("cannot write a note: {error}");
        Error::new(ErrorKind::Io, "gc", message)
    })?;
    let hash = blake3::hash(&content).to_hex();
    let key = format!("{}{hash}", names::GARBAGE);
    repository.objects().put(&key, content).await
}

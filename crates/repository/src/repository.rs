//! [`Repository`]: what is in a store, by tags and numbers.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use futures_util::stream::{self, StreamExt};
use vellum_io::{Error, ErrorKind, Result};

use crate::codec::manifest::{Entry, MOST_ENTRY_BYTES, Manifest, TombstoneKind};
use crate::codec::{CHUNK_BYTES, PushId};
use crate::names::{self, DiskName, TagName};
use crate::objects::Objects;
use crate::runs::Runs;

/// Small objects that are asked for at once.
pub(crate) const REQUESTS_AT_ONCE: usize = 16;
/// Manifests that are read at once; each may be large.
const ENTRIES_AT_ONCE: usize = 8;

/// A repository: disks in a store of objects, each chunk of them once.
#[derive(Debug, Clone)]
pub struct Repository {
    objects: Arc<dyn Objects>,
}

/// What manifests lead to.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Used {
    pub(crate) segments: BTreeMap<PushId, Runs>,
    pub(crate) pushes: HashSet<PushId>,
}

impl Used {
    pub(crate) fn add(&mut self, manifest: &Manifest) {
        self.pushes.extend(manifest.pushes());
        for used in &manifest.segments {
            let runs = self.segments.entry(used.push).or_default();
            for &(first, last) in &used.numbers {
                runs.add(first, last);
            }
        }
    }

    pub(crate) fn has_segment(&self, push: PushId, number: u32) -> bool {
        let numbers = self.segments.get(&push);
        numbers.is_some_and(|numbers| numbers.contains(number))
    }
}

fn marker() -> Vec<u8> {
    format!("{{\"vellum-repository\": 1, \"chunk-bytes\": {CHUNK_BYTES}}}\n").into_bytes()
}

impl Repository {
    /// Opens a repository.
    ///
    /// # Errors
    /// If there is none, or one of a newer program.
    pub async fn open(objects: Arc<dyn Objects>) -> Result<Self> {
        let found = objects.get(names::MARKER, 4096).await;
        match found {
            Ok(found) if found == marker() => Ok(Repository { objects }),
            Ok(_) => {
                let message = "this is no repository that this program knows";
                Err(Error::new(ErrorKind::Unsupported, "open", message).target(objects.name()))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let message = "there is no repository: the first push makes one";
                Err(Error::new(ErrorKind::NotFound, "open", message).target(objects.name()))
            }
            Err(error) => Err(error),
        }
    }

    /// Opens a repository, and makes one where there is none.
    ///
    /// # Errors
    /// As [`Repository::open`].
    pub async fn open_or_make(objects: Arc<dyn Objects>) -> Result<Self> {
        match Repository::open(objects.clone()).await {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                match objects.put_new(names::MARKER, marker()).await? {
                    true => Ok(Repository { objects }),
                    false => Repository::open(objects).await,
                }
            }
            opened => opened,
        }
    }

    /// Sees that the store puts nothing in the place of what is there when it is asked not to: who comes second
    /// would not know it, and take the place of a disk or of a tombstone.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if it does, and what it says.
    pub(crate) async fn check_store(&self) -> Result<()> {
        if !self.objects.put_new(names::MARKER, marker()).await? {
            return Ok(());
        }
        let message = "the store puts an object in the place of one that is there although it is asked not to \
            (If-None-Match: *): a disk could be lost that another one pushes";
        Err(Error::new(ErrorKind::Unsupported, "write", message).target(self.name()))
    }

    /// The store.
    pub fn objects(&self) -> &Arc<dyn Objects> {
        &self.objects
    }

    /// Where it is, for messages.
    pub fn name(&self) -> &str {
        self.objects.name()
    }

    /// The tags, and under each the numbers that something is under, ascending.
    ///
    /// # Errors
    /// What the store says.
    pub async fn numbers(&self) -> Result<BTreeMap<TagName, Vec<u64>>> {
        self.numbers_below(names::TAGS).await
    }

    /// The numbers of a tag that something is under, ascending.
    ///
    /// # Errors
    /// What the store says.
    pub async fn numbers_of(&self, tag: &TagName) -> Result<Vec<u64>> {
        let mut numbers = self.numbers_below(&names::tag(tag)).await?;
        Ok(numbers.remove(tag).unwrap_or_default())
    }

    async fn numbers_below(&self, prefix: &str) -> Result<BTreeMap<TagName, Vec<u64>>> {
        let mut numbers = BTreeMap::<TagName, Vec<u64>>::new();
        for object in self.objects.list(prefix).await? {
            if let Some((tag, number)) = names::parse_entry(&object.key) {
                numbers.entry(tag).or_default().push(number);
            }
        }
        numbers
            .values_mut()
            .for_each(|numbers| numbers.sort_unstable());
        Ok(numbers)
    }

    /// What is under a number; `None` if nothing is.
    ///
    /// # Errors
    /// If it is damaged, and what the store says.
    pub async fn entry(&self, tag: &TagName, number: u64) -> Result<Option<Entry>> {
        let key = names::entry(tag, number);
        let found = match self.objects.get(&key, MOST_ENTRY_BYTES).await {
            Ok(found) => found,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let entry = Entry::decode(&found, tag, number);
        entry.map(Some).map_err(|error| self.at(error, &key))
    }

    /// An error about an object.
    pub(crate) fn at(&self, error: Error, key: &str) -> Error {
        let message = format!("{key}: {}", error.message());
        Error::new(error.kind(), error.operation(), message).target(self.name())
    }

    /// The manifest of a disk.
    ///
    /// # Errors
    /// If there is no such disk.
    pub async fn find(&self, disk: &DiskName) -> Result<Manifest> {
        match self.look_for(disk).await? {
            Some(manifest) => Ok(manifest),
            None => {
                let message = format!("there is no disk '{disk}' in the repository");
                Err(Error::new(ErrorKind::NotFound, "open", message).target(self.name()))
            }
        }
    }

    /// As [`Repository::find`]; `None` if there is none.
    ///
    /// # Errors
    /// If something is damaged, and what the store says.
    pub async fn look_for(&self, disk: &DiskName) -> Result<Option<Manifest>> {
        let numbers = self.numbers_of(&disk.tag).await?;
        for &number in numbers.iter().rev() {
            match self.entry(&disk.tag, number).await? {
                Some(Entry::Manifest(found)) if disk.number.is_none_or(|want| want == number) => {
                    return Ok(Some(*found));
                }
                Some(Entry::Tombstone(found)) if found.kind == TombstoneKind::Removed => break,
                _ => {}
            }
        }
        Ok(None)
    }

    /// The disks of all tags, by tag and number, and what is wrong with others.
    ///
    /// # Errors
    /// What the store says to lists.
    pub async fn disks(&self) -> Result<(Vec<Manifest>, Vec<Error>)> {
        let (mut disks, mut problems) = (Vec::new(), Vec::new());
        self.each_entry(|_, _, entry| {
            match entry {
                Ok(Entry::Manifest(manifest)) => disks.push(*manifest),
                Ok(Entry::Tombstone(_)) => {}
                Err(error) => problems.push(error),
            }
            Ok(())
        })
        .await?;
        disks.sort_by(|a, b| (&a.tag, a.number).cmp(&(&b.tag, b.number)));
        Ok((disks, problems))
    }

    /// All that counts: manifests and tombstones, newest first within each tag, given to `take` one by
    /// one, and what cannot be read.
    ///
    /// # Errors
    /// That of `take`, and what the store says to lists.
    pub(crate) async fn each_entry(
        &self,
        mut take: impl FnMut(&TagName, u64, Result<Entry>) -> Result<()>,
    ) -> Result<()> {
        let counts = |tag: &TagName, number, entry, counts| match counts {
            true => take(tag, number, entry),
            false => Ok(()),
        };
        self.each_entry_and_hidden(counts).await
    }

    /// As [`Repository::each_entry`], with what is below the removal of a tag, too; the last argument
    /// says whether it counts.
    ///
    /// # Errors
    /// As there.
    pub(crate) async fn each_entry_and_hidden(
        &self,
        mut take: impl FnMut(&TagName, u64, Result<Entry>, bool) -> Result<()>,
    ) -> Result<()> {
        let numbers = self.numbers().await?;
        let all = numbers.into_iter().flat_map(|(tag, numbers)| {
            let numbers = numbers.into_iter().rev();
            numbers.map(move |number| (tag.clone(), number))
        });
        let read = |(tag, number): (TagName, u64)| async move {
            let entry = self.entry(&tag, number).await;
            (tag, number, entry.transpose())
        };
        let mut entries = stream::iter(all.map(read)).buffered(ENTRIES_AT_ONCE);
        let mut removed = None;
        while let Some((tag, number, entry)) = entries.next().await {
            // What was removed meanwhile is not there any more.
            let Some(entry) = entry else { continue };
            let counts = removed.as_ref() != Some(&tag);
            if let Ok(Entry::Tombstone(there)) = &entry
                && there.kind == TombstoneKind::Removed
            {
                removed = Some(tag.clone());
            }
            take(&tag, number, entry, counts)?;
        }
        Ok(())
    }

    /// What all manifests lead to.
    ///
    /// # Errors
    /// If one cannot be read: nobody knows what it leads to.
    pub(crate) async fn used(&self) -> Result<Used> {
        let (used, damaged) = self.used_and_damaged().await?;
        match damaged {
            None => Ok(used),
            Some(error) => {
                let message = format!(
                    "{}; nothing is removed while nobody knows what it leads to: put it right, or remove \
                     its tag ('vellum repo remove')",
                    error.message()
                );
                Err(Error::new(error.kind(), "gc", message).target(self.name()))
            }
        }
    }

    /// What all manifests lead to that can be read, and what is wrong with one that cannot.
    ///
    /// # Errors
    /// What the store says to lists.
    pub(crate) async fn used_and_damaged(&self) -> Result<(Used, Option<Error>)> {
        let (mut used, mut damaged) = (Used::default(), None);
        self.each_entry(|_, _, entry| {
            match entry {
                Ok(Entry::Manifest(manifest)) => used.add(&manifest),
                Ok(Entry::Tombstone(_)) => {}
                Err(error) => damaged = Some(error),
            }
            Ok(())
        })
        .await?;
        Ok((used, damaged))
    }

    /// Removes objects side by side.
    ///
    /// # Errors
    /// What the store says; all others are removed nevertheless.
    pub(crate) async fn remove_all(&self, keys: Vec<String>) -> Result<()> {
        let removed = stream::iter(keys).map(|key| async move { self.objects.remove(&key).await });
        let mut removed = removed.buffer_unordered(REQUESTS_AT_ONCE);
        let mut result = Ok(());
        while let Some(one) = removed.next().await {
            result = result.and(one);
        }
        result
    }
}

//! Looks whether everything is there that disks lead to, and is what was written.

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap, HashSet};

use futures_util::stream::{self, StreamExt};
use vellum_io::{Error, ErrorKind, Result, lane};

use crate::codec::hash_list::{self, MOST_LIST_BYTES};
use crate::codec::manifest::{Entry, Manifest, piece_chunks};
use crate::codec::piece::SegmentRef;
use crate::codec::segment::{SegmentIndex, decompress};
use crate::codec::{PushId, damaged};
use crate::names::{self, DiskName};
use crate::pieces;
use crate::repository::{REQUESTS_AT_ONCE, Repository, Used};
use crate::sound;

/// Segments that are read at once.
const SEGMENTS_AT_ONCE: usize = 4;

/// What was looked at, and what is wrong.
#[derive(Debug, Default)]
pub struct Verified {
    /// Disks.
    pub disks: u64,
    /// Segments that they lead to.
    pub segments: u64,
    /// Bytes of these.
    pub segment_bytes: u64,
    /// Objects that no disk leads to, and their bytes; `vellum repo gc` removes them.
    pub unused: u64,
    /// Their bytes.
    pub unused_bytes: u64,
    /// What is wrong, and which disks it damages.
    pub problems: Vec<String>,
}

/// Looks at all disks. `with_data`: all chunks are read and compared; otherwise only what leads to them,
/// and that they are there, with the right length. `progress` is told how many segments of how many
/// are done.
///
/// What is found to be damaged is marked for pushes, which send what is in it again.
///
/// # Errors
/// What the store says to lists; that something is wrong is no error.
pub async fn verify(
    repository: &Repository,
    with_data: bool,
    mut progress: impl FnMut(u64, u64),
) -> Result<Verified> {
    let mut verified = Verified::default();
    let mut disks = Vec::new();
    repository
        .each_entry(|tag, number, entry| {
            match entry {
                Ok(Entry::Manifest(manifest)) => disks.push(*manifest),
                Ok(Entry::Tombstone(_)) => {}
                Err(error) => verified.problems.push(format!("{tag}@{number}: {error}")),
            }
            Ok(())
        })
        .await?;
    verified.disks = disks.len() as u64;
    let mut segments = BTreeMap::<(PushId, u32), (SegmentRef, String)>::new();
    let mut seen = HashSet::new();
    for disk in &disks {
        look_at_map(repository, disk, &mut seen, &mut segments, &mut verified).await;
    }
    let listed = repository.objects().list(names::SEGMENTS).await?;
    let lengths = listed
        .iter()
        .map(|object| (object.key.as_str(), object.len_bytes));
    let lengths = lengths.collect::<HashMap<_, _>>();
    let mut there = Vec::new();
    let holders = Holders::of(&disks);
    for ((push, number), (segment, disk)) in &segments {
        let disks = || holders.names((*push, *number), disk);
        let key = names::part(names::SEGMENTS, *push, *number);
        let wanted = segment.footer.segment_bytes();
        match lengths.get(key.as_str()) {
            None => verified
                .problems
                .push(format!("{key} is missing (of {})", disks())),
            Some(&len) if len != wanted => {
                let problem = format!("{key} has {len} bytes, not {wanted} (of {})", disks());
                verified.problems.push(problem);
            }
            Some(_) => {
                verified.segment_bytes += wanted;
                there.push((key, *segment, disk.clone()));
            }
        }
    }
    verified.segments = segments.len() as u64;
    count_unused(&listed, &segments, &mut verified);
    look_at_lists(repository, &segments, &mut verified).await?;
    let total = there.len() as u64;
    let mut marks = Marks::look(repository).await?;
    let check = |(key, segment, disk): (String, SegmentRef, String)| async move {
        let checked = check_segment(repository, &key, &segment, with_data).await;
        (segment, disk, checked)
    };
    let mut checks = stream::iter(there).map(check).buffered(SEGMENTS_AT_ONCE);
    let mut done = 0;
    while let Some((segment, disk, checked)) = checks.next().await {
        marks.note(&segment, &checked, with_data).await;
        let problem = checked.err().map(|error| {
            let disks = holders.names((segment.push, segment.number), &disk);
            format!("{error} (of {disks})")
        });
        verified.problems.extend(problem);
        done += 1;
        progress(done, total);
    }
    verified.problems.extend(marks.problem());
    Ok(verified)
}

/// Which disks hold a segment, for those that are damaged.
struct Holders<'a> {
    disks: &'a [Manifest],
    /// The segments of each, once somebody asks.
    used: OnceCell<Vec<Used>>,
}

impl<'a> Holders<'a> {
    fn of(disks: &'a [Manifest]) -> Self {
        Holders {
            disks,
            used: OnceCell::new(),
        }
    }

    /// The names of all disks that a segment is listed by; `one` is among them if its manifest is right.
    fn names(&self, (push, number): (PushId, u32), one: &str) -> String {
        let used = self.used.get_or_init(|| {
            let used = self.disks.iter().map(|disk| {
                let mut used = Used::default();
                used.add(disk);
                used
            });
            used.collect()
        });
        let holders = self.disks.iter().zip(used);
        let holders = holders.filter(|(_, used)| used.has_segment(push, number));
        let names: Vec<String> = holders.map(|(disk, _)| name_of(disk).to_string()).collect();
        match names.is_empty() {
            true => one.to_owned(),
            false => names.join(", "),
        }
    }
}

fn name_of(disk: &Manifest) -> DiskName {
    DiskName {
        tag: disk.tag.clone(),
        number: Some(disk.number),
    }
}

/// The marks that tell pushes of damaged segments, as they come and go.
struct Marks<'a> {
    repository: &'a Repository,
    marked: HashSet<(PushId, u32)>,
    /// Why one is not what it should be.
    failed: Option<Error>,
}

impl<'a> Marks<'a> {
    async fn look(repository: &'a Repository) -> Result<Self> {
        Ok(Marks {
            repository,
            marked: sound::marked(repository).await?,
            failed: None,
        })
    }

    /// Marks a segment that is damaged, and unmarks one all of which was found to be whole.
    async fn note(&mut self, segment: &SegmentRef, checked: &Result<()>, with_data: bool) {
        let key = (segment.push, segment.number);
        let is_marked = self.marked.contains(&key);
        let done = match checked {
            // One that cannot be read now may be whole.
            Err(error) if error.kind() == ErrorKind::Corrupt && !is_marked => {
                sound::mark(self.repository, key).await
            }
            Ok(()) if with_data && is_marked => sound::unmark(self.repository, key).await,
            _ => Ok(()),
        };
        self.failed = self.failed.take().or(done.err());
    }

    fn problem(&self) -> Option<String> {
        let error = self.failed.as_ref()?;
        Some(format!(
            "pushes cannot be told which segments are damaged, and will use them: {error}"
        ))
    }
}

/// Whether the lists that pushes look for chunks in are whole, and right.
async fn look_at_lists(
    repository: &Repository,
    segments: &BTreeMap<(PushId, u32), (SegmentRef, String)>,
    verified: &mut Verified,
) -> Result<()> {
    let listed = repository.objects().list(names::INDEXES).await?;
    let read = |key: String| async move {
        let list = repository.objects().get(&key, MOST_LIST_BYTES).await;
        (key, list.and_then(|list| hash_list::decode(&list)))
    };
    let keys = listed.into_iter().map(|object| object.key);
    let mut lists = stream::iter(keys).map(read).buffered(REQUESTS_AT_ONCE);
    while let Some((key, list)) = lists.next().await {
        let Some((push, _)) = names::parse_part(names::INDEXES, &key) else {
            continue;
        };
        let found = match list {
            Ok(found) => found,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => {
                let error = repository.at(error, &key);
                verified.problems.push(error.to_string());
                continue;
            }
        };
        for listed in found {
            let known = segments.get(&(push, listed.number));
            if known.is_some_and(|(known, _)| known.footer != listed.footer) {
                let number = listed.number;
                verified
                    .problems
                    .push(format!("{key} says something else of segment {number}"));
            }
        }
    }
    Ok(())
}

fn count_unused(
    listed: &[crate::ObjectInfo],
    segments: &BTreeMap<(PushId, u32), (SegmentRef, String)>,
    verified: &mut Verified,
) {
    let is_unused = |key: &str| {
        let part = names::parse_part(names::SEGMENTS, key);
        part.is_none_or(|part| !segments.contains_key(&part))
    };
    for object in listed.iter().filter(|object| is_unused(&object.key)) {
        verified.unused += 1;
        verified.unused_bytes += object.len_bytes;
    }
}

async fn look_at_map(
    repository: &Repository,
    disk: &Manifest,
    seen: &mut HashSet<[u8; 32]>,
    segments: &mut BTreeMap<(PushId, u32), (SegmentRef, String)>,
    verified: &mut Verified,
) {
    let name = name_of(disk);
    let mut listed = Used::default();
    listed.add(disk);
    for (number, at) in (0..).zip(&disk.pieces) {
        let Some(at) = at.as_ref() else { continue };
        // What another disk has shown to be whole; but the manifest must list its segments, too.
        let is_new = seen.insert(at.hash.0);
        let chunks = piece_chunks(disk.disk_bytes, number);
        let piece = match pieces::load(repository, at, chunks).await {
            Ok(piece) => piece,
            Err(error) => {
                verified.problems.push(format!("{error} (of {name})"));
                continue;
            }
        };
        for segment in piece.segments() {
            let key = (segment.push, segment.number);
            if !listed.has_segment(segment.push, segment.number) {
                let problem = format!("the manifest of {name} does not list all of its segments");
                verified.problems.push(problem);
            }
            if !is_new {
                continue;
            }
            let known = segments.entry(key);
            let (known, other) = known.or_insert_with(|| (*segment, name.to_string()));
            if known.footer != segment.footer {
                let problem = format!("{name} and {other} disagree on what segment {key:?} is");
                verified.problems.push(problem);
            }
        }
    }
}

async fn check_segment(
    repository: &Repository,
    key: &str,
    segment: &SegmentRef,
    with_data: bool,
) -> Result<()> {
    let objects = repository.objects();
    let footer = segment.footer;
    let range = match with_data {
        true => 0..footer.index_range().end,
        false => footer.index_range(),
    };
    let bytes = objects.get_range(key, range).await?;
    let checked = lane::compute(move || {
        let data_bytes = if with_data {
            footer.data_bytes as usize
        } else {
            0
        };
        let (data, index) = bytes
            .split_at_checked(data_bytes)
            .ok_or_else(|| damaged("a segment ends too early"))?;
        if *blake3::hash(index).as_bytes() != footer.index_hash {
            return Err(damaged("a segment that is not what was written"));
        }
        let index = SegmentIndex::decode(index, footer.chunks)?;
        if !with_data {
            return Ok(());
        }
        for (number, chunk) in (0..).zip(index.chunks()) {
            let range = index.range(number..number + 1);
            let stored = range.and_then(|range| data.get(range.start as usize..range.end as usize));
            let stored = stored.ok_or_else(|| damaged("a segment ends too early"))?;
            decompress(stored, &chunk.hash)?;
        }
        Ok(())
    });
    checked.await.map_err(|error| repository.at(error, key))
}

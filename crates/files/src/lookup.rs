//! Names in directories, found without a look at each of them every time.
//!
//! A file system says how the names of a directory are walked through, and which name is wanted. In a
//! directory with more than a few names an index is made: the hash of each name, and its place.
//!
//! Invariants:
//! - An index only says where to look: the name at that place is compared, so no hash that is equal,
//!   and nothing that an image says, leads to another file.
//! - What is found is what a walk from the start would find, and so are errors.
//! - Hashes have a key that no image knows, so none can have many of the same.
//! - All indexes take [`INDEXES_BYTES_MAX`] at most, and the one that is being made as much as the
//!   largest. Those that were not used for the longest time go.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::mem::size_of;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::file_system::{Entry, Id};

/// Names that are looked at before an index is made: a walk past so few takes no longer.
const WALKED_MAX: usize = 256;
/// Most hashes in one index; names behind these are walked through.
const INDEX_HASHES_MAX: usize = 1 << 20;
/// Most memory that indexes take, in bytes.
const INDEXES_BYTES_MAX: usize = 32 << 20;

/// A name as it is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Key<'a> {
    /// Byte by byte.
    Exact(&'a [u8]),
    /// In small letters.
    Folded(&'a str),
}

/// An entry of a directory, and what it is found by.
pub(crate) struct Named<'a> {
    pub(crate) keys: &'a [Key<'a>],
    pub(crate) id: Id,
    pub(crate) next: u64,
}

impl<'a> Named<'a> {
    pub(crate) fn new(entry: &Entry<'_>, keys: &'a [Key<'a>]) -> Named<'a> {
        Named {
            keys,
            id: entry.id,
            next: entry.next,
        }
    }
}

/// Takes an entry; `false`: it wants no more.
pub(crate) type Take<'a> = &'a mut dyn FnMut(&Named<'_>) -> bool;

/// Gives the names in a directory from a place on, as [`FileSystem::list`] does.
///
/// [`FileSystem::list`]: crate::FileSystem::list
type Walk<'a> = &'a dyn Fn(u64, Take<'_>) -> Result<()>;

/// What is known of the directories of a file system.
#[derive(Default)]
pub(crate) struct Lookups {
    hasher: RandomState,
    indexes: Mutex<Indexes>,
}

impl Lookups {
    /// The file that a name means. Of several keys the first one that is there counts, of several
    /// entries the first one. Damage is an error if it may hide the name.
    pub(crate) fn find(
        &self,
        directory: Id,
        wanted: &[Key<'_>],
        walk: Walk<'_>,
    ) -> Result<Option<Id>> {
        let index = self.indexes.lock().get(directory);
        if let Some(index) = index {
            return self.find_by(&index, wanted, walk, Ok(()));
        }
        let mut search = Search::new(wanted);
        let (mut passed, mut is_long) = (0, false);
        let walked = walk(0, &mut |named| {
            is_long = passed == WALKED_MAX;
            passed += 1;
            !is_long && search.goes_on(named)
        });
        if !is_long {
            return search.finish(walked);
        }
        let Some(_making) = Making::begin(&self.indexes) else {
            let mut search = Search::new(wanted);
            let walked = walk(0, &mut |named| search.goes_on(named));
            return search.finish(walked);
        };
        let (index, made) = self.make(walk);
        let index = Arc::new(index);
        // An error may be gone next time.
        if made.is_ok() {
            self.indexes.lock().insert(directory, index.clone());
        }
        self.find_by(&index, wanted, walk, made)
    }

    fn hash(&self, key: &Key<'_>) -> u32 {
        self.hasher.hash_one(key) as u32
    }

    /// Makes an index; an error that is none of the directory's own, so that it cannot be kept.
    fn make(&self, walk: Walk<'_>) -> (Index, Result<()>) {
        let mut index = Index::default();
        let mut place = 0_u32;
        let walked = walk(0, &mut |named| {
            if index.hashes.len() + named.keys.len() > INDEX_HASHES_MAX {
                index.rest = Some(place.into());
                return false;
            }
            let hashes = named.keys.iter().map(|key| (self.hash(key), place));
            index.hashes.extend(hashes);
            match u32::try_from(named.next) {
                Ok(next) => place = next,
                Err(_) => index.rest = Some(named.next),
            }
            index.rest.is_none()
        });
        index.hashes.sort_unstable();
        index.hashes.shrink_to_fit();
        match walked {
            Err(Error::Damaged { structure, at }) => {
                index.damage = Some((structure, at));
                (index, Ok(()))
            }
            walked => (index, walked),
        }
    }

    /// What [`Lookups::find`] finds, by an index, and how the walk ended that made it.
    fn find_by(
        &self,
        index: &Index,
        wanted: &[Key<'_>],
        walk: Walk<'_>,
        made: Result<()>,
    ) -> Result<Option<Id>> {
        let mut search = Search::new(wanted);
        for (rank, key) in wanted.iter().enumerate() {
            for place in index.places(self.hash(key)) {
                walk(place.into(), &mut |named| {
                    // Of another key only the first one is right, which this may not be.
                    if named.keys.contains(key) {
                        search.found = Some((rank, named.id));
                    }
                    false
                })?;
                if search.found.is_some() {
                    break;
                }
            }
            if search.found.is_some() {
                break;
            }
        }
        if search.is_over() {
            return search.finish(Ok(()));
        }
        let rest = match index.rest {
            Some(from) => walk(from, &mut |named| search.goes_on(named)),
            None => Ok(()),
        };
        search.finish(made.and(index.damage()).and(rest))
    }
}

/// A walk that looks for a name.
struct Search<'a> {
    wanted: &'a [Key<'a>],
    /// By which of the keys, and the file.
    found: Option<(usize, Id)>,
}

impl<'a> Search<'a> {
    fn new(wanted: &'a [Key<'a>]) -> Search<'a> {
        Search {
            wanted,
            found: None,
        }
    }

    /// Nothing better can be found.
    fn is_over(&self) -> bool {
        self.found.is_some_and(|(rank, _)| rank == 0)
    }

    /// Looks at an entry; whether others are of use.
    fn goes_on(&mut self, named: &Named<'_>) -> bool {
        let best = self.found.map_or(self.wanted.len(), |(rank, _)| rank);
        let rank = self.wanted[..best]
            .iter()
            .position(|key| named.keys.contains(key));
        if let Some(rank) = rank {
            self.found = Some((rank, named.id));
        }
        !self.is_over()
    }

    /// What is damaged may hide the name, but not one that is elsewhere.
    fn finish(self, walked: Result<()>) -> Result<Option<Id>> {
        if !self.is_over() {
            walked?;
        }
        Ok(self.found.map(|(_, id)| id))
    }
}

/// Where the names of a directory are.
#[derive(Debug, Default)]
struct Index {
    /// The hash of a key, and where its entry is found: the end of the one before. In order.
    hashes: Vec<(u32, u32)>,
    /// Where the names begin that it does not have.
    rest: Option<u64>,
    /// What of the directory is damaged.
    damage: Option<(&'static str, u64)>,
}

impl Index {
    /// Places where a key of that hash may be, in the order of the directory.
    fn places(&self, hash: u32) -> impl Iterator<Item = u32> + '_ {
        let first = self.hashes.partition_point(|known| known.0 < hash);
        let same = self.hashes[first..].iter();
        same.take_while(move |known| known.0 == hash)
            .map(|known| known.1)
    }

    fn damage(&self) -> Result<()> {
        let damage = |(structure, at)| Error::Damaged { structure, at };
        self.damage.map_or(Ok(()), |known| Err(damage(known)))
    }

    fn bytes(&self) -> usize {
        // With what the table of indexes needs.
        self.hashes.capacity() * size_of::<(u32, u32)>() + 2 * size_of::<Index>()
    }
}

/// Indexes by their directories.
#[derive(Default)]
struct Indexes {
    known: HashMap<Id, (Arc<Index>, u64)>,
    /// Counts uses, to tell which index was used last.
    clock: u64,
    bytes: usize,
    is_making: bool,
}

impl Indexes {
    fn get(&mut self, directory: Id) -> Option<Arc<Index>> {
        self.clock += 1;
        let (index, used) = self.known.get_mut(&directory)?;
        *used = self.clock;
        Some(index.clone())
    }

    fn insert(&mut self, directory: Id, index: Arc<Index>) {
        let bytes = index.bytes();
        while self.bytes + bytes > INDEXES_BYTES_MAX {
            let oldest = self.known.iter().min_by_key(|(_, (_, used))| *used);
            let Some(oldest) = oldest.map(|(directory, _)| *directory) else {
                return;
            };
            let gone = self.known.remove(&oldest);
            self.bytes -= gone.map_or(0, |(index, _)| index.bytes());
        }
        self.clock += 1;
        let before = self.known.insert(directory, (index, self.clock));
        self.bytes += bytes;
        self.bytes -= before.map_or(0, |(index, _)| index.bytes());
    }
}

/// The right to make an index: one at a time, whatever becomes of who makes it.
struct Making<'a>(&'a Mutex<Indexes>);

impl Making<'_> {
    fn begin(indexes: &Mutex<Indexes>) -> Option<Making<'_>> {
        let was_making = std::mem::replace(&mut indexes.lock().is_making, true);
        (!was_making).then_some(Making(indexes))
    }
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.0.lock().is_making = false;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io;

    use super::*;

    /// A directory in which the name at a place has that place as its file, and the next one behind it.
    #[derive(Default)]
    struct Directory {
        names: Vec<String>,
        is_folded: bool,
        /// What follows the names.
        error: Option<fn() -> Error>,
        passed: Cell<usize>,
    }

    impl Directory {
        fn walk(&self, from: u64, take: Take<'_>) -> Result<()> {
            for (id, name) in self.names.iter().enumerate().skip(from as usize) {
                self.passed.set(self.passed.get() + 1);
                let folded = name.to_lowercase();
                let keys = [Key::Exact(name.as_bytes()), Key::Folded(&folded)];
                let named = Named {
                    keys: &keys[..1 + usize::from(self.is_folded)],
                    id: id as u64,
                    next: id as u64 + 1,
                };
                if !take(&named) {
                    return Ok(());
                }
            }
            self.error.map_or(Ok(()), |error| Err(error()))
        }

        fn find(&self, lookups: &Lookups, name: &str) -> Result<Option<Id>> {
            let folded = name.to_lowercase();
            let keys = [Key::Exact(name.as_bytes()), Key::Folded(&folded)];
            let wanted = &keys[..1 + usize::from(self.is_folded)];
            lookups.find(7, wanted, &|from, take| self.walk(from, take))
        }

        /// What a look at each name finds.
        fn expected(&self, name: &str) -> Option<Id> {
            let folded = name.to_lowercase();
            let exact = self.names.iter().position(|known| known == name);
            let similar = || self.names.iter().position(|n| n.to_lowercase() == folded);
            let found = exact.or_else(|| self.is_folded.then(similar).flatten());
            found.map(|id| id as u64)
        }
    }

    fn damage() -> Error {
        Error::damaged("something", 5)
    }

    #[test]
    fn what_is_found_is_what_a_look_at_each_name_finds() {
        for (is_folded, error) in [
            (false, None),
            (true, None),
            (true, Some(damage as fn() -> _)),
        ] {
            let mut random = fastrand::Rng::with_seed(3);
            // Many of them are there twice, in the same or in other letters.
            let mut name = || match random.bool() {
                true => format!("Name {}", random.u32(..2000)),
                false => format!("name {}", random.u32(..2000)),
            };
            let directory = Directory {
                names: (0..3000).map(|_| name()).collect(),
                is_folded,
                error,
                ..Directory::default()
            };
            let lookups = Lookups::default();
            for _ in 0..2000 {
                let name = name();
                let found = directory.find(&lookups, &name);
                let is_exact = directory.names.contains(&name);
                match directory.expected(&name) {
                    // A better one may be in what is damaged.
                    _ if error.is_some() && !is_exact => {
                        let error = found.expect_err("damage may hide it");
                        assert_eq!(error.to_string(), damage().to_string());
                    }
                    expected => assert_eq!(found.expect("sound"), expected, "{name}"),
                }
            }
            let passed = directory.passed.get();
            assert!(passed < 2 * 3000 + 2000 * 3, "{passed} were looked at");
        }
    }

    #[test]
    fn an_equal_hash_finds_no_other_file() {
        let directory = Directory {
            names: vec!["one".to_owned(), "two".to_owned(), "three".to_owned()],
            ..Directory::default()
        };
        let lookups = Lookups::default();
        let wanted = [Key::Exact(b"three")];
        let hash = lookups.hash(&wanted[0]);
        let find = |places: &[u32]| {
            let index = Index {
                hashes: places.iter().map(|place| (hash, *place)).collect(),
                ..Index::default()
            };
            lookups.find_by(
                &index,
                &wanted,
                &|from, take| directory.walk(from, take),
                Ok(()),
            )
        };
        assert_eq!(find(&[0, 1, 2]).expect("sound"), Some(2));
        assert_eq!(find(&[0, 1]).expect("sound"), None);
        assert_eq!(find(&[9]).expect("sound"), None);
    }

    #[test]
    fn an_equal_hash_finds_no_similar_name_before_the_exact_one() {
        let directory = Directory {
            names: vec!["THREE".to_owned(), "three".to_owned()],
            is_folded: true,
            ..Directory::default()
        };
        let lookups = Lookups::default();
        let wanted = [Key::Exact(b"three"), Key::Folded("three")];
        let hash = lookups.hash(&wanted[0]);
        let index = Index {
            hashes: vec![(hash, 0), (hash, 1)],
            ..Index::default()
        };
        let walk: Walk<'_> = &|from, take| directory.walk(from, take);
        let found = lookups.find_by(&index, &wanted, walk, Ok(()));
        assert_eq!(found.expect("sound"), Some(1));
    }

    #[test]
    fn names_behind_the_longest_index_are_found() {
        let directory = Directory {
            names: (0..INDEX_HASHES_MAX + 100).map(|n| n.to_string()).collect(),
            ..Directory::default()
        };
        let lookups = Lookups::default();
        for id in [
            0,
            300,
            INDEX_HASHES_MAX - 1,
            INDEX_HASHES_MAX,
            INDEX_HASHES_MAX + 99,
        ] {
            let found = directory.find(&lookups, &id.to_string());
            assert_eq!(found.expect("sound"), Some(id as u64));
        }
        assert_eq!(directory.find(&lookups, "none").expect("sound"), None);
        let passed = directory.passed.get();
        assert!(passed < INDEX_HASHES_MAX + 2000, "{passed} were looked at");
        let bytes = lookups.indexes.lock().bytes;
        assert!(bytes <= INDEXES_BYTES_MAX / 4 + 200, "{bytes}");
    }

    #[test]
    fn an_error_of_the_disk_is_asked_for_again() {
        let mut directory = Directory {
            names: (0..1000).map(|n| n.to_string()).collect(),
            error: Some(|| io::Error::other("unplugged").into()),
            ..Directory::default()
        };
        let lookups = Lookups::default();
        assert_eq!(directory.find(&lookups, "900").expect("there"), Some(900));
        directory.find(&lookups, "none").expect_err("unplugged");
        directory.error = None;
        assert_eq!(directory.find(&lookups, "none").expect("sound"), None);
    }

    #[test]
    fn an_error_of_the_disk_may_hide_a_better_name() {
        let mut names: Vec<_> = (0..1000).map(|n| n.to_string()).collect();
        names.push("Similar".to_owned());
        let directory = Directory {
            names,
            is_folded: true,
            error: Some(|| io::Error::other("unplugged").into()),
            ..Directory::default()
        };
        let lookups = Lookups::default();
        let found = directory.find(&lookups, "Similar").expect("exactly that");
        assert_eq!(found, Some(1000));
        directory.find(&lookups, "similar").expect_err("unplugged");
    }

    #[test]
    fn damage_before_the_names_that_an_index_does_not_have_is_told() {
        let directory = Directory {
            names: vec!["one".to_owned(), "two".to_owned()],
            ..Directory::default()
        };
        let index = Index {
            rest: Some(1),
            damage: Some(("something", 5)),
            ..Index::default()
        };
        let find = |name: &str| {
            let walk: Walk<'_> = &|from, take| directory.walk(from, take);
            Lookups::default().find_by(&index, &[Key::Exact(name.as_bytes())], walk, Ok(()))
        };
        assert_eq!(find("two").expect("behind it"), Some(1));
        let error = find("three").expect_err("damage may hide it");
        assert_eq!(error.to_string(), damage().to_string());
    }

    #[test]
    fn what_was_not_used_for_the_longest_time_goes() {
        let mut indexes = Indexes::default();
        for directory in 0..100 {
            let hashes = vec![(0, 0); INDEX_HASHES_MAX / 4];
            let index = Index {
                hashes,
                ..Index::default()
            };
            indexes.insert(directory, Arc::new(index));
            assert!(indexes.get(0).is_some(), "used each time");
            let held: usize = indexes.known.values().map(|(index, _)| index.bytes()).sum();
            assert_eq!(indexes.bytes, held);
            assert!(held <= INDEXES_BYTES_MAX);
        }
        assert!(indexes.get(99).is_some() && indexes.get(98).is_some());
        assert!(indexes.get(1).is_none() && indexes.known.len() > 10);
    }

    #[test]
    fn one_index_is_made_at_a_time() {
        let indexes = Mutex::default();
        let making = Making::begin(&indexes).expect("the first one");
        assert!(Making::begin(&indexes).is_none());
        drop(making);
        assert!(Making::begin(&indexes).is_some());
    }
}

//! Objects that are gone, cut off or changed: pushing the disk again makes it whole.

use vellum_io::{Buffer, Buffers, ErrorKind};
use vellum_repository::{
    CHUNK_BYTES, DiskName, Pushed, READ_DISK, RepositoryStorage, Since, TagName, Verified, verify,
};
use vellum_storage::Storage;

use crate::races::{DAY, Running, Shared, check, collecting, pushing, pushing_with, removing};

/// What becomes of an object.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Damage {
    Gone,
    Short,
    Changed,
}

const ALL: [Damage; 3] = [Damage::Gone, Damage::Short, Damage::Changed];

fn damage(store: &Shared, prefix: &str, what: Damage) {
    store.lock().damage(prefix, |content| {
        let len = content.len();
        match what {
            Damage::Gone => return false,
            Damage::Short => content.truncate(len / 2),
            Damage::Changed => content[len / 3] ^= 1,
        }
        true
    });
}

fn verifying(store: &Shared, with_data: bool) -> Verified {
    let verifying = Running::new(store, 1002, move |repository| async move {
        verify(&repository, with_data, |_, _| {}).await
    });
    verifying.finish().unwrap()
}

/// A push of what has changed since the newest disk of a tag: nothing.
fn push_changes(store: &Shared, id: u8, base: &str, name: &'static str, chunks: u32) -> Pushed {
    let base = DiskName {
        tag: TagName::parse(base).unwrap(),
        number: None,
    };
    let since = Since {
        base,
        push: None,
        dirty: Vec::new(),
    };
    let pushed = pushing_with(store, id, name, 0..chunks, move |options| {
        options.since = Some(since);
    });
    pushed.finish().unwrap()
}

/// All problems are of the first disk, and go with it.
fn check_without(store: &Shared, tag: &'static str) {
    let problems = verifying(store, true).problems;
    let of_tag = format!("(of {tag}@1)");
    assert!(!problems.is_empty());
    assert!(
        problems.iter().all(|problem| problem.ends_with(&of_tag)),
        "{problems:?}"
    );
    assert_eq!(removing(store, tag), 1);
    check(store);
    collecting(store, DAY);
    check(store);
    assert!(!store.lock().has("damaged/"));
}

#[test]
fn what_a_damaged_segment_held_is_sent_again() {
    for what in ALL {
        for only_changes in [false, true] {
            let store = Shared::default();
            // Two segments; the first one is damaged.
            pushing(&store, 1, "one", 0, 300).finish().unwrap();
            damage(&store, &segment(1, 0), what);
            // Only who has read all can tell that it was changed.
            assert_eq!(verifying(&store, true).problems.len(), 1);
            let pushed = match only_changes {
                true => push_changes(&store, 2, "one", "two", 300),
                false => pushing(&store, 2, "two", 0, 300).finish().unwrap(),
            };
            let cost = pushed.manifest.cost;
            assert_eq!(cost.new_bytes, 256 * CHUNK_BYTES, "{what:?} {only_changes}");
            let read = if only_changes { 256 } else { 300 };
            assert_eq!(cost.read_bytes, read * CHUNK_BYTES);
            // What was sent is known to the next one.
            let pushed = pushing(&store, 3, "three", 0, 300).finish().unwrap();
            assert_eq!(pushed.manifest.cost.new_bytes, 0);
            check_without(&store, "one");
        }
    }
}

#[test]
fn whoever_reads_a_damaged_disk_is_told_what_is_damaged() {
    for (key, what, expected) in [
        (segment(1, 0), Damage::Gone, "it is missing"),
        (segment(1, 0), Damage::Short, " bytes, not "),
        (segment(1, 0), Damage::Changed, "a chunk"),
        ("maps/".to_owned(), Damage::Gone, "it is missing"),
        ("maps/".to_owned(), Damage::Changed, "not what was written"),
    ] {
        let store = Shared::default();
        pushing(&store, 1, "one", 0, 10).finish().unwrap();
        damage(&store, &key, what);
        let reading = Running::new(&store, 1005, |repository| async move {
            let disk = DiskName::parse("one")?;
            let disk = RepositoryStorage::open(&repository, &disk).await?;
            let buffers = Buffers::from_iter([Buffer::for_read(10 << 16)]);
            disk.read(0, buffers).await.map(drop)
        });
        let error = reading.finish().unwrap_err();
        assert_eq!(error.operation(), READ_DISK);
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        let told = error.message();
        let named = told.starts_with(&key) && told.contains(expected);
        assert!(named && told.contains("push the disk again"), "{told}");
    }
}

#[test]
fn a_damaged_map_is_made_anew() {
    for what in ALL {
        for only_changes in [false, true] {
            let store = Shared::default();
            pushing(&store, 1, "one", 0, 300).finish().unwrap();
            damage(&store, "maps/", what);
            let pushed = match only_changes {
                true => push_changes(&store, 2, "one", "one", 300),
                false => pushing(&store, 2, "one", 0, 300).finish().unwrap(),
            };
            let cost = pushed.manifest.cost;
            assert_eq!(cost.new_bytes, 0, "{what:?} {only_changes}");
            assert_eq!(cost.read_bytes, 300 * CHUNK_BYTES);
            let problems = verifying(&store, true).problems;
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].ends_with("(of one@1)"), "{problems:?}");
        }
    }
}

#[test]
fn all_disks_of_a_damaged_segment_are_named() {
    for what in ALL {
        let store = Shared::default();
        for (id, name) in [(1, "one"), (2, "two"), (3, "three")] {
            pushing(&store, id, name, 0, 10).finish().unwrap();
        }
        // Another one of its own.
        pushing(&store, 4, "four", 1000, 10).finish().unwrap();
        damage(&store, &segment(1, 0), what);
        let problems = verifying(&store, true).problems;
        assert_eq!(problems.len(), 1, "{problems:?}");
        let told = problems[0].ends_with("(of one@1, three@1, two@1)");
        assert!(told, "{problems:?}");
    }
}

#[test]
fn what_is_whole_again_is_used_again() {
    let store = Shared::default();
    pushing(&store, 1, "one", 0, 10).finish().unwrap();
    damage(&store, &segment(1, 0), Damage::Changed);
    // Whoever reads none of the chunks sees nothing of it.
    assert!(verifying(&store, false).problems.is_empty());
    assert!(!store.lock().has("damaged/"));
    assert_eq!(verifying(&store, true).problems.len(), 1);
    assert!(store.lock().has("damaged/"));
    damage(&store, &segment(1, 0), Damage::Changed);
    assert!(verifying(&store, false).problems.is_empty());
    assert!(store.lock().has("damaged/"));
    check(&store);
    assert!(!store.lock().has("damaged/"));
    let pushed = pushing(&store, 2, "two", 0, 10).finish().unwrap();
    assert_eq!(pushed.manifest.cost.new_bytes, 0);
}

fn segment(push: u8, number: u32) -> String {
    let push = format!("{push:02x}").repeat(16);
    format!("segments/{push}/{number:08}")
}

//! One push that is held up at one place while somebody else works.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use vellum::raw::{Raw, RawOptions};
use vellum_io::ErrorKind;
use vellum_io::executor::Executor;
use vellum_repository::{
    CHUNK_BYTES, Collected, GcOptions, Holder, Keep, Objects, PruneOptions, PushId, PushOptions,
    Pushed, Repository, TagName, gc, prune, push, remove_tag, verify,
};
use vellum_storage::MemStorage;

use crate::store::{Client, Store};

pub type Shared = Arc<Mutex<Store>>;

/// Something that runs by its own.
pub struct Running<T> {
    store: Shared,
    executor: Executor,
    client: usize,
    done: Rc<RefCell<Option<T>>>,
}

impl<T: 'static> Running<T> {
    pub fn new<F: Future<Output = T> + 'static>(
        store: &Shared,
        client: usize,
        work: impl FnOnce(Repository) -> F,
    ) -> Self {
        let executor = Executor::new(|| {});
        let done = Rc::new(RefCell::new(None));
        let slot = done.clone();
        let objects: Arc<dyn Objects> = Arc::new(Client::new(store, client));
        // Opened by hand, since the work is made before anything runs.
        let opened = Rc::new(RefCell::new(None));
        let opening = opened.clone();
        drop(executor.spawn(async move {
            *opening.borrow_mut() = Some(Repository::open_or_make(objects).await.unwrap());
        }));
        let repository = loop {
            executor.run_ready();
            if let Some(repository) = opened.borrow_mut().take() {
                break repository;
            }
            assert!(store.lock().step_of(client));
        };
        let work = work(repository);
        drop(executor.spawn(async move {
            let result = work.await;
            *slot.borrow_mut() = Some(result);
        }));
        Running {
            store: store.clone(),
            executor,
            client,
            done,
        }
    }

    /// Runs it until it is about to make an object of such a key.
    pub fn run_until_it_makes(&self, prefix: &str) {
        loop {
            self.executor.run_ready();
            assert!(self.done.borrow().is_none(), "it has ended before {prefix}");
            let mut store = self.store.lock();
            if store.is_asked_to_make(prefix) {
                return;
            }
            assert!(store.step_of(self.client));
        }
    }

    pub fn finish(self) -> T {
        loop {
            self.executor.run_ready();
            if let Some(result) = self.done.borrow_mut().take() {
                return result;
            }
            assert!(
                self.store.lock().step_of(self.client),
                "it waits for nothing"
            );
        }
    }
}

fn holder(boot: &str) -> Holder {
    Holder {
        host: "elsewhere".to_owned(),
        boot: boot.to_owned(),
        pid_namespace: String::new(),
        pid: 1,
        started: String::new(),
    }
}

fn tag(name: &str) -> TagName {
    TagName::parse(name).unwrap()
}

/// Pushes a disk of chunks of so many kinds, beginning with `first`.
pub fn pushing(
    store: &Shared,
    id: u8,
    name: &'static str,
    first: u32,
    chunks: u32,
) -> Running<vellum_io::Result<Pushed>> {
    pushing_with(store, id, name, first..first + chunks, |_| {})
}

/// As [`pushing`], with options that `change` makes.
pub fn pushing_with(
    store: &Shared,
    id: u8,
    name: &'static str,
    kinds: Range<u32>,
    change: impl FnOnce(&mut PushOptions) + 'static,
) -> Running<vellum_io::Result<Pushed>> {
    let mut bytes = vec![0; kinds.len() * CHUNK_BYTES as usize];
    for (chunk, kind) in bytes.chunks_mut(CHUNK_BYTES as usize).zip(kinds) {
        chunk[..4].copy_from_slice(&(kind + 1).to_be_bytes());
    }
    let disk = Raw::open(
        Arc::new(MemStorage::with_bytes(bytes)),
        RawOptions::default(),
    )
    .unwrap();
    Running::new(store, usize::from(id), move |repository| async move {
        let mut options = PushOptions {
            push: PushId([id; 16]),
            holder: holder(&id.to_string()),
            ..PushOptions::new(tag(name))?
        };
        change(&mut options);
        let disk: Arc<dyn vellum::BlockDevice> = disk;
        push(&repository, &disk, &options, |_, _| {}).await
    })
}

pub fn removing(store: &Shared, name: &'static str) -> u64 {
    let removing = Running::new(store, 1001, move |repository| async move {
        remove_tag(&repository, &tag(name), &PruneOptions::default()).await
    });
    removing.finish().unwrap()
}

pub fn collecting(store: &Shared, stale: Duration) -> Collected {
    let collecting = Running::new(store, 1000, move |repository| async move {
        let options = GcOptions {
            stale,
            ..GcOptions::default()
        };
        gc(&repository, &options).await
    });
    collecting.finish().unwrap()
}

pub const DAY: Duration = Duration::from_secs(86_400);

pub fn check(store: &Shared) {
    let verifying = Running::new(store, 1002, |repository| async move {
        verify(&repository, true, |_, _| {}).await
    });
    let verified = verifying.finish().unwrap();
    assert_eq!(verified.problems, Vec::<String>::new());
}

#[test]
fn what_a_push_has_seen_stays_until_it_has_ended() {
    let store = Shared::default();
    pushing(&store, 1, "one", 0, 3).finish().unwrap();
    let slow = pushing(&store, 2, "two", 0, 3);
    slow.run_until_it_makes("tags/two/");
    assert_eq!(removing(&store, "one"), 1);
    let collected = collecting(&store, DAY);
    assert_eq!(collected.removed, 0);
    assert!(collected.waiting > 0);
    let pushed = slow.finish().unwrap();
    assert_eq!(pushed.manifest.cost.new_bytes, 0);
    check(&store);
    assert_eq!(collecting(&store, DAY).waiting, 0);
    check(&store);
    assert_eq!(removing(&store, "two"), 1);
    assert!(collecting(&store, DAY).removed > 0);
    assert_eq!(collecting(&store, DAY), Collected::default());
}

#[test]
fn what_no_disk_leads_to_is_sent_again() {
    let store = Shared::default();
    // Two segments, of which the second disk has the second one alone.
    pushing(&store, 1, "one", 0, 300).finish().unwrap();
    pushing(&store, 2, "one", 256, 44).finish().unwrap();
    let pruning = Running::new(&store, 1003, |repository| async move {
        let keep = Keep {
            newest: Some(1),
            within: None,
        };
        prune(&repository, &keep, &PruneOptions::default()).await
    });
    assert_eq!(pruning.finish().unwrap().len(), 1);
    assert_eq!(collecting(&store, DAY).removed, 1);
    let pushed = pushing(&store, 3, "two", 0, 256).finish().unwrap();
    assert_eq!(pushed.manifest.cost.new_bytes, 256 * CHUNK_BYTES);
    check(&store);
}

#[test]
fn a_push_that_was_given_up_fails() {
    let store = Shared::default();
    pushing(&store, 1, "one", 0, 3).finish().unwrap();
    let slow = pushing(&store, 2, "one", 5, 3);
    slow.run_until_it_makes("tags/one/");
    // Time passes with requests.
    let collected = collecting(&store, Duration::ZERO);
    assert_eq!(collected.given_up, 1);
    let error = slow.finish().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Changed);
    check(&store);
    let pushed = pushing(&store, 3, "one", 5, 3).finish().unwrap();
    // The second number was the one that was given up.
    assert_eq!(pushed.manifest.number, 3);
    check(&store);
}

#[test]
fn a_push_that_goes_on_for_another_is_not_given_up_for_it() {
    let store = Shared::default();
    let killed = pushing(&store, 1, "one", 0, 3);
    killed.run_until_it_makes("tags/one/");
    killed.executor.close();
    store.lock().forget(1);
    store.lock().pass(2 * 86_400);
    let slow = pushing_with(&store, 2, "one", 0..3, |options| options.take_over = true);
    slow.run_until_it_makes("tags/one/");
    assert_eq!(collecting(&store, DAY).given_up, 0);
    let pushed = slow.finish().unwrap();
    assert_eq!((pushed.manifest.number, pushed.resumed_segments), (1, 1));
    check(&store);
    collecting(&store, DAY);
    assert_eq!(collecting(&store, DAY), Collected::default());
}

#[test]
fn of_two_pushes_to_a_tag_one_is_refused() {
    let store = Shared::default();
    let slow = pushing(&store, 1, "one", 0, 3);
    slow.run_until_it_makes("segments/");
    let error = pushing(&store, 2, "one", 5, 3).finish().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked);
    slow.finish().unwrap();
    pushing(&store, 3, "one", 5, 3).finish().unwrap();
    check(&store);
}

#[test]
fn a_store_that_takes_no_conditions_is_refused() {
    let store = Shared::default();
    pushing(&store, 1, "one", 0, 3).finish().unwrap();
    store.lock().ignores_conditions = true;
    let error = pushing(&store, 2, "two", 0, 3).finish().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("If-None-Match"), "{error}");
    assert!(!store.lock().has("sessions/"));
    // What is removed is guarded in the same way.
    let gc = Running::new(&store, 1001, |repository| async move {
        gc(&repository, &GcOptions::default()).await
    });
    let removal = Running::new(&store, 1002, |repository| async move {
        remove_tag(&repository, &tag("one"), &PruneOptions::default()).await
    });
    assert_eq!(gc.finish().unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(removal.finish().unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(!store.lock().has("locks/"));
    store.lock().ignores_conditions = false;
    pushing(&store, 3, "two", 0, 3).finish().unwrap();
    check(&store);
}

#[test]
fn removing_a_tag_ends_a_push_to_it() {
    let store = Shared::default();
    pushing(&store, 1, "one", 0, 3).finish().unwrap();
    let slow = pushing(&store, 2, "one", 5, 3);
    slow.run_until_it_makes("tags/one/");
    assert_eq!(removing(&store, "one"), 1);
    assert_eq!(slow.finish().unwrap_err().kind(), ErrorKind::Changed);
    check(&store);
}

/// A process of this machine that has ended.
fn ended() -> Holder {
    Holder {
        started: "1".to_owned(),
        ..Holder::this_process()
    }
}

#[test]
fn what_a_push_has_left_whose_process_is_gone_is_removed_at_once() {
    let store = Shared::default();
    kill(
        &store,
        pushing_with(&store, 2, "one", 5..8, |options| options.holder = ended()),
        "tags/one/",
    );
    let collected = collecting(&store, DAY);
    assert_eq!(collected.given_up, 1);
    assert!(collected.removed > 0, "{collected:?}");
    pushing(&store, 4, "one", 5, 3).finish().unwrap();
    check(&store);
}

#[test]
fn what_another_push_goes_on_with_is_kept() {
    let store = Shared::default();
    kill(
        &store,
        pushing_with(&store, 2, "one", 5..8, |options| options.holder = ended()),
        "segments/",
    );
    let next = pushing(&store, 3, "one", 5, 3);
    next.run_until_it_makes("tags/one/");
    let collected = collecting(&store, DAY);
    assert_eq!((collected.given_up, collected.removed), (0, 0));
    next.finish().unwrap();
    check(&store);
}

/// Kills a push that is about to make such an object.
fn kill(store: &Shared, push: Running<vellum_io::Result<Pushed>>, prefix: &str) {
    push.run_until_it_makes(prefix);
    push.executor.close();
    store.lock().forget(push.client);
}

#[test]
fn a_removal_that_was_killed_brings_nothing_back() {
    let store = Shared::default();
    pushing(&store, 1, "one", 0, 3).finish().unwrap();
    let removal = Running::new(&store, 1001, |repository| async move {
        let options = PruneOptions {
            holder: holder("gone"),
            ..PruneOptions::default()
        };
        remove_tag(&repository, &tag("one"), &options).await
    });
    // It has said that the tag is removed, and is killed before it does the rest.
    removal.run_until_it_makes("tags/one/0000000001");
    removal.executor.close();
    store.lock().forget(1001);
    let collecting = Running::new(&store, 1000, |repository| async move {
        let options = GcOptions {
            break_lock: true,
            ..GcOptions::default()
        };
        gc(&repository, &options).await
    });
    assert!(collecting.finish().unwrap().removed > 0);
    pushing(&store, 2, "one", 10, 3).finish().unwrap();
    store.lock().pass(40 * 86_400);
    for _ in 0..2 {
        let pruning = Running::new(&store, 1003, |repository| async move {
            let keep = Keep {
                newest: Some(1),
                within: None,
            };
            prune(&repository, &keep, &PruneOptions::default()).await
        });
        assert_eq!(pruning.finish().unwrap().len(), 0);
        check(&store);
        let listing = Running::new(&store, 1004, |repository| async move {
            repository.disks().await
        });
        let (disks, _) = listing.finish().unwrap();
        assert_eq!(
            disks.iter().map(|disk| disk.number).collect::<Vec<_>>(),
            [3]
        );
    }
}

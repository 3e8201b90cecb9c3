//! What clients do, and what must be true of the store whatever they do.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use vellum::BlockDevice;
use vellum::raw::{Raw, RawOptions};
use vellum_io::executor::Executor;
use vellum_io::{Buffer, Buffers, ErrorKind, Result};
use vellum_repository::{
    CHUNK_BYTES, DiskName, GcOptions, Holder, Keep, Objects, PruneOptions, PushId, PushOptions,
    Repository, RepositoryStorage, Since, TagName, gc, prune, push, remove_tag, verify,
};
use vellum_storage::{MemStorage, Storage};

use crate::store::{Client, Store};

/// Content of each chunk of a disk, 0 for zeroes: few kinds, so that many are the same.
type Content = Vec<u8>;

/// What is known beside the store.
#[derive(Default)]
struct Model {
    /// What each push was to put, whether or not it was told that it had.
    contents: HashMap<PushId, Content>,
    /// Disks whose pushes have said that they are there.
    pushed: BTreeMap<(String, u64), PushId>,
    /// What each push was compared with, to know what has changed since.
    removed_tags: HashSet<String>,
    has_pruned: bool,
    next_push: u128,
    pushes: u64,
    removed: u64,
}

struct Process {
    executor: Executor,
    done: Rc<RefCell<bool>>,
}

/// A run with one seed.
pub struct World {
    seed: u64,
    random: fastrand::Rng,
    store: Arc<Mutex<Store>>,
    model: Rc<RefCell<Model>>,
    pub kills: u64,
    pub faults: u64,
}

const TAGS: [&str; 2] = ["one", "two"];
const MOST_CHUNKS: usize = 10;

fn bytes_of(content: &[u8]) -> Vec<u8> {
    let chunk = |&kind: &u8| vec![kind; CHUNK_BYTES as usize];
    content.iter().flat_map(chunk).collect()
}

fn disk_of(content: &[u8]) -> Arc<dyn BlockDevice> {
    let bytes = Arc::new(MemStorage::with_bytes(bytes_of(content)));
    Raw::open(bytes, RawOptions::default()).expect("a disk")
}

/// What differs, as a bitmap would tell it; and some more.
fn dirty(old: &[u8], new: &[u8], random: &mut fastrand::Rng) -> Vec<Range<u64>> {
    let differs = |at: usize| old.get(at) != new.get(at);
    let chunks = (0..new.len()).filter(|&at| differs(at) || random.u32(..8) == 0);
    chunks
        .map(|at| at as u64 * CHUNK_BYTES..(at as u64 + 1) * CHUNK_BYTES)
        .collect()
}

impl World {
    pub fn run(seed: u64) -> World {
        let mut world = World {
            seed,
            random: fastrand::Rng::with_seed(seed),
            store: Arc::default(),
            model: Rc::default(),
            kills: 0,
            faults: 0,
        };
        let fault_every = [0, 0, 400, 100, 30][world.random.usize(..5)];
        let kill_every = [0, 400, 150][world.random.usize(..3)];
        let clients = world.random.usize(1..=6);
        let mut processes = Vec::new();
        let mut started = 0;
        let mut to_start = world.random.usize(4..30);
        loop {
            while processes.len() < clients && to_start > 0 {
                to_start -= 1;
                processes.push((started, world.start(started)));
                started += 1;
            }
            processes.retain(|(_, process): &(usize, Process)| {
                process.executor.run_ready();
                !*process.done.borrow()
            });
            if world.store.lock().pending() == 0 {
                assert!(
                    processes.is_empty(),
                    "seed {seed}: somebody waits for nothing"
                );
                if to_start == 0 {
                    break;
                }
                continue;
            }
            if kill_every > 0 && !processes.is_empty() && world.random.u32(..kill_every) == 0 {
                let at = world.random.usize(..processes.len());
                let (number, process) = processes.swap_remove(at);
                process.executor.close();
                world.store.lock().kill(number, &mut world.random);
                world.kills += 1;
                continue;
            }
            let changed = world.store.lock().step(&mut world.random, fault_every);
            if changed && world.random.u32(..8) == 0 {
                world.check();
            }
        }
        world.check();
        world.faults = world.store.lock().faults;
        world.settle();
        world
    }

    pub fn pushed(&self) -> u64 {
        self.model.borrow().pushes
    }

    pub fn removed(&self) -> u64 {
        self.model.borrow().removed
    }

    /// Starts something.
    fn start(&mut self, number: usize) -> Process {
        let seed = self.random.u64(..);
        let client: Arc<dyn Objects> = Arc::new(Client::new(&self.store, number));
        let model = self.model.clone();
        let done = Rc::new(RefCell::new(false));
        let ended = done.clone();
        let executor = Executor::new(|| {});
        let task = async move {
            // What fails is tried again by others, or not.
            let _ = act(client, model, number, seed).await;
            *ended.borrow_mut() = true;
        };
        drop(executor.spawn(task));
        Process { executor, done }
    }

    /// Everything that can be named is whole, and everything that was pushed is there.
    fn check(&self) {
        let copy = Arc::new(Mutex::new(self.store.lock().copy()));
        let model = self.model.borrow();
        let contents = model.contents.clone();
        let seed = self.seed;
        let found = alone(&copy, move |objects| async move {
            let repository = match Repository::open(objects).await {
                Ok(repository) => repository,
                Err(error) if error.kind() == ErrorKind::NotFound => return HashMap::new(),
                Err(error) => panic!("seed {seed}: {error}"),
            };
            let verified = verify(&repository, true, |_, _| {})
                .await
                .expect("no faults here");
            assert!(
                verified.problems.is_empty(),
                "seed {seed}: {:?}",
                verified.problems
            );
            let mut found = HashMap::new();
            for (tag, numbers) in repository.numbers().await.expect("no faults here") {
                for number in numbers {
                    let tag = tag.clone();
                    let name = DiskName {
                        tag,
                        number: Some(number),
                    };
                    let there = repository.look_for(&name).await.expect("no faults here");
                    if let Some(manifest) = there {
                        let push = manifest.push;
                        let disk = RepositoryStorage::of(&repository, manifest);
                        let bytes = read(&*disk).await.expect("it is whole");
                        assert!(bytes == bytes_of(&contents[&push]), "seed {seed}: {name}");
                        found.insert((name.tag.to_string(), number), push);
                    }
                }
            }
            found
        });
        let newest = |tag: &str| {
            // Also one whose push does not know that it has come so far.
            let of_tag = model.pushed.keys().chain(found.keys());
            let of_tag = of_tag.filter(|(other, _)| other == tag);
            of_tag.map(|(_, number)| *number).max()
        };
        for ((tag, number), push) in &model.pushed {
            let may_be_gone = model.removed_tags.contains(tag)
                || (model.has_pruned && newest(tag) != Some(*number));
            let there = found.get(&(tag.clone(), *number));
            assert!(
                there == Some(push) || (may_be_gone && there.is_none()),
                "seed {seed}: {tag}@{number} of {push} is {there:?}"
            );
        }
    }

    /// When all is quiet, what nothing leads to goes, and a push works.
    fn settle(&mut self) {
        let before = self.store.lock().copy();
        let model = self.model.clone();
        let store = Arc::new(Mutex::new(before));
        let seed = self.seed;
        alone(&store, move |objects| async move {
            let repository = Repository::open_or_make(objects)
                .await
                .expect("no faults here");
            let options = GcOptions {
                stale: Duration::ZERO,
                break_lock: true,
                holder: holder(1000),
                ..GcOptions::default()
            };
            // The lock's own requests are later than all sessions.
            gc(&repository, &options).await.expect("no faults here");
            let left = gc(&repository, &options).await.expect("no faults here");
            assert_eq!(left.removed + left.waiting, 0, "seed {seed}: {left:?}");
            let verified = verify(&repository, true, |_, _| {})
                .await
                .expect("no faults here");
            assert_eq!(verified.unused, 0, "seed {seed}: {verified:?}");
            let pushed = push_one(&repository, &model, "one", 1000, 7).await;
            pushed.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        });
        self.store = store;
        self.check();
    }
}

/// Runs something with a store without faults, in order.
fn alone<T: 'static, F: Future<Output = T> + 'static>(
    store: &Arc<Mutex<Store>>,
    work: impl FnOnce(Arc<dyn Objects>) -> F,
) -> T {
    let executor = Executor::new(|| {});
    let result = Rc::new(RefCell::new(None));
    let slot = result.clone();
    let work = work(Arc::new(Client::new(store, usize::MAX)));
    drop(executor.spawn(async move {
        let done = work.await;
        *slot.borrow_mut() = Some(done);
    }));
    let mut random = fastrand::Rng::with_seed(0);
    loop {
        executor.run_ready();
        if let Some(done) = result.borrow_mut().take() {
            return done;
        }
        store.lock().step(&mut random, 0);
    }
}

async fn read(disk: &dyn Storage) -> Result<Vec<u8>> {
    let len = disk.len_bytes()? as usize;
    let buffers = Buffers::from_iter([Buffer::for_read(len)]);
    Ok(Buffer::join_all(disk.read(0, buffers).await?).to_vec())
}

/// A process of another machine: nobody knows whether it is gone.
fn holder(number: usize) -> Holder {
    Holder {
        host: "elsewhere".to_owned(),
        boot: format!("boot {number}"),
        pid_namespace: String::new(),
        pid: number as u32,
        started: String::new(),
    }
}

async fn act(
    objects: Arc<dyn Objects>,
    model: Rc<RefCell<Model>>,
    number: usize,
    seed: u64,
) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(seed);
    let repository = Repository::open_or_make(objects).await?;
    let tag = TAGS[random.usize(..TAGS.len())];
    let options = PruneOptions {
        holder: holder(number),
        ..PruneOptions::default()
    };
    match random.u32(..10) {
        0..5 => push_one(&repository, &model, tag, number, random.u64(..)).await,
        5 => {
            model.borrow_mut().has_pruned = true;
            let newest = Some(random.u64(1..3));
            let keep = Keep {
                newest,
                ..Keep::default()
            };
            prune(&repository, &keep, &options).await.map(drop)
        }
        6 if random.u32(..2) == 0 => {
            model.borrow_mut().removed_tags.insert(tag.to_owned());
            let tag = TagName::parse(tag).expect("a tag");
            remove_tag(&repository, &tag, &options).await.map(drop)
        }
        _ => {
            let stale = Duration::from_secs([0, 100, 10_000][random.usize(..3)]);
            let options = GcOptions {
                stale,
                holder: holder(number),
                ..GcOptions::default()
            };
            let collected = gc(&repository, &options).await?;
            model.borrow_mut().removed += collected.removed;
            Ok(())
        }
    }
}

async fn push_one(
    repository: &Repository,
    model: &Rc<RefCell<Model>>,
    tag: &str,
    number: usize,
    seed: u64,
) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(seed);
    let tag = TagName::parse(tag).expect("a tag");
    let base = DiskName {
        tag: tag.clone(),
        number: None,
    };
    let before = repository.look_for(&base).await?.map(|before| before.push);
    let old = before.map(|before| model.borrow().contents[&before].clone());
    let mut content = match &old {
        Some(old) => old.clone(),
        None => Vec::new(),
    };
    content.resize(random.usize(1..MOST_CHUNKS), 0);
    // What disks hold changes with time, so that segments are used no more.
    let young = (model.borrow().next_push / 3 * 4 % 240) as u8;
    for _ in 0..random.usize(..MOST_CHUNKS) {
        let at = random.usize(..content.len());
        content[at] = match random.u8(..8) {
            0 => 0,
            kind => kind + young,
        };
    }
    let id = {
        let mut model = model.borrow_mut();
        model.next_push += 1;
        // Not in the order of time.
        let id = PushId((model.next_push | u128::from(random.u8(..)) << 120).to_be_bytes());
        model.contents.insert(id, content.clone());
        id
    };
    let since = match (before, old) {
        (Some(push), Some(old)) if random.bool() => Some(Since {
            base,
            push: Some(push),
            dirty: dirty(&old, &content, &mut random),
        }),
        _ => None,
    };
    let options = PushOptions {
        since,
        push: id,
        holder: holder(number),
        take_over: random.bool(),
        ..PushOptions::new(tag.clone())?
    };
    let pushed = push(repository, &disk_of(&content), &options, |_, _| {}).await?;
    let mut model = model.borrow_mut();
    model.pushes += 1;
    let there = (tag.to_string(), pushed.manifest.number);
    assert!(
        model.pushed.insert(there, id).is_none(),
        "one number, two disks"
    );
    Ok(())
}

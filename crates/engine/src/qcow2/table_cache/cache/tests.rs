use std::cell::Cell;
use std::collections::HashMap;

use futures_util::FutureExt;
use proptest::prelude::*;
use vellum_format::geometry::Geometry;

use super::*;
use crate::qcow2::mapping::packed::L2Codec;

const TABLE: usize = 4096;

fn filled(byte: u8) -> Buffer {
    let mut bytes = Buffer::zeroed(TABLE);
    bytes.fill(byte);
    bytes
}

fn key(table: u64) -> u64 {
    table * TABLE as u64
}

fn load_now<C: Codec>(cache: &TableCache<C>, key: u64, byte: u8) {
    let load = cache.load(key, async { Ok(filled(byte)) });
    load.now_or_never().unwrap().unwrap();
}

/// Looks at a table, and loads it where it is missing; whether it was there.
fn touch(cache: &TableCache, key: u64) -> bool {
    let hit = cache.with(key, |_| ()).is_some();
    if !hit {
        load_now(cache, key, 1);
        cache.with(key, |_| ());
    }
    hit
}

fn adaptive(max_bytes: u64) -> TableCache {
    let budget = Budget {
        max_bytes,
        adaptive: true,
        holds_all: false,
    };
    TableCache::with_codec(RawTables, TABLE, budget)
}

fn l2_geometry() -> Geometry {
    Geometry::new(3, 16, false, 4, false).unwrap()
}

#[test]
fn stays_within_its_budget_and_keeps_dirty_tables() {
    for budget in [16 << 10, 100 << 10, 1 << 20] {
        let cache = TableCache::new(TABLE, budget);
        load_now(&cache, 0, 7);
        cache.update(0, |bytes| bytes[0] = 8).unwrap();
        for table in 1..1000 {
            load_now(&cache, key(table), 1);
            assert!(cache.used_bytes() <= budget as usize);
        }
        assert!(cache.used_bytes() >= budget as usize * 2 / 3);
        assert_eq!(cache.with(0, |bytes| bytes[0]), Some(8));
    }
}

#[test]
fn two_tables_fit_into_any_budget() {
    let cache = TableCache::new(TABLE, 1);
    touch(&cache, 0);
    touch(&cache, key(1));
    assert!(cache.with(key(1), |_| ()).is_some());
    cache.update(key(1), |bytes| bytes[0] = 2).unwrap();
    touch(&cache, key(2));
    assert_eq!(cache.with(key(1), |bytes| bytes[0]), Some(2));
    assert!(cache.with(key(2), |_| ()).is_some());
}

#[test]
fn a_table_changed_during_writeback_stays_dirty() {
    let cache = TableCache::new(TABLE, 8 * TABLE as u64);
    load_now(&cache, 0, 0);
    cache.update(0, |bytes| bytes[0] = 1).unwrap();
    let first = cache.begin_writeback();
    cache.update(0, |bytes| bytes[0] = 2).unwrap();
    assert!(
        cache.begin_writeback().is_empty(),
        "one write of a table at a time"
    );
    cache.end_writeback(first.iter().map(|w| w.key), true);
    let second = cache.begin_writeback();
    assert_eq!((first[0].bytes[0], second[0].bytes[0]), (1, 2));
    cache.end_writeback([0], true);
    assert!(cache.begin_writeback().is_empty());
    assert!(cache.is_clean());
}

#[test]
fn loads_are_joined_and_survive_an_abandoned_leader() {
    let cache = TableCache::new(TABLE, 8 * TABLE as u64);
    let reads = Cell::new(0);
    let mut leader = Box::pin(cache.load(0, std::future::pending()));
    assert!(leader.as_mut().now_or_never().is_none());
    let mut follower = Box::pin(cache.load(0, async {
        reads.set(reads.get() + 1);
        Ok(filled(3))
    }));
    assert!(follower.as_mut().now_or_never().is_none());
    drop(leader);
    follower
        .as_mut()
        .now_or_never()
        .expect("reads in the leader's place")
        .unwrap();
    assert_eq!((reads.get(), cache.with(0, |bytes| bytes[0])), (1, Some(3)));
}

#[test]
fn a_load_that_was_forgotten_does_not_end_the_next_one() {
    let cache = TableCache::new(TABLE, 8 * TABLE as u64);
    let go = Event::new();
    let waits = go.listen();
    let mut old = Box::pin(cache.load(0, async {
        waits.await;
        Ok(filled(1))
    }));
    assert!(old.as_mut().now_or_never().is_none());
    cache.forget(0);
    let mut new = Box::pin(cache.load(0, std::future::pending()));
    assert!(new.as_mut().now_or_never().is_none());
    go.notify(1);
    old.as_mut().now_or_never().unwrap().unwrap();
    assert_eq!(cache.with(0, |bytes| bytes[0]), None, "stale bytes");
    drop(old);
    assert!(
        matches!(cache.claim(0), Claim::Joined(_)),
        "the new load goes on"
    );
}

#[test]
fn a_run_is_loaded_as_far_as_it_is_missing() {
    let cache = TableCache::new(TABLE, 64 * TABLE as u64);
    load_now(&cache, key(5), 9);
    let load = cache.load_run(key(2), 8, true, |tables| async move {
        Ok(Buffer::join_all(
            (0..tables).map(|table| filled(table as u8)),
        ))
    });
    load.now_or_never().unwrap().unwrap();
    let bytes = |table| cache.with(key(table), |bytes| bytes[17]);
    let found: Vec<_> = (1..8).map(bytes).collect();
    assert_eq!(
        found,
        [None, Some(0), Some(1), Some(2), Some(9), None, None]
    );
}

#[test]
fn unused_tables_are_dropped_at_the_second_call() {
    let cache = TableCache::new(TABLE, 1 << 20);
    for table in 0..100 {
        load_now(&cache, key(table), 1);
    }
    cache.update(key(3), |bytes| bytes[0] = 2).unwrap();
    cache.drop_unused();
    assert!(cache.used_bytes() > 100 * TABLE);
    cache.drop_unused();
    assert!(cache.used_bytes() < TABLE + 1024, "the dirty one is left");
}

/// A hot set that filled the cache before, used by every second request while a
/// scan goes by once.
#[test]
fn a_scan_does_not_push_out_a_hot_set() {
    let cache = TableCache::new(TABLE, 110 * TABLE as u64);
    for round in 0..5 {
        for table in 0..80 {
            touch(&cache, key(table * 7919 % 80 + 80 * (round / 10)));
        }
    }
    let mut hits = 0;
    let scanned = 10_000;
    for at in 0..scanned {
        let table = key(1_000_000 + at);
        // Each table of the scan is used by many requests.
        for look in 0..20 {
            if cache.with(table, |_| ()).is_none() {
                assert_eq!(look, 0, "evicted while the scan uses it");
                let load = cache.load_run(table, 1, true, |_| async move { Ok(filled(1)) });
                load.now_or_never().unwrap().unwrap();
            }
        }
        hits += u64::from(touch(&cache, key(at * 31 % 80)));
    }
    assert!(hits * 100 > scanned * 99, "{hits} of {scanned}");
}

#[test]
fn an_adaptive_cache_takes_what_the_working_set_needs() {
    let cache = adaptive(32 << 20);
    assert_eq!(cache.limit_bytes(), START_BYTES);
    for table in 0..5000 {
        touch(&cache, key(table));
    }
    assert_eq!(cache.limit_bytes(), START_BYTES, "a scan needs nothing");
    // A working set of 2 MiB, by chance.
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..20_000 {
        touch(&cache, key(random.u64(..512)));
    }
    let missed = (0..2000)
        .filter(|_| !touch(&cache, key(random.u64(..512))))
        .count();
    assert!(missed < 20, "{missed} misses");
    assert!(cache.limit_bytes() < 4 << 20, "{}", cache.limit_bytes());
    cache.drop_unused();
    cache.drop_unused();
    assert_eq!(cache.limit_bytes(), START_BYTES);
}

#[test]
fn a_budget_can_shrink() {
    let cache = TableCache::new(TABLE, 4 << 20);
    (0..1000).for_each(|table| load_now(&cache, key(table), 1));
    cache.set_budget(Budget {
        max_bytes: 256 << 10,
        adaptive: false,
        holds_all: false,
    });
    assert!(cache.used_bytes() <= 256 << 10);
    load_now(&cache, key(5000), 1);
    assert!(cache.used_bytes() <= 256 << 10);
}

/// What a request can do with the tables.
#[derive(Debug, Clone)]
enum Step {
    Look(u64),
    Change(u64, usize, u64),
    WriteBack(bool),
    Forget(u64),
    Clean,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let table = 0..40u64;
    let step = prop_oneof![
        8 => table.clone().prop_map(Step::Look),
        4 => (table.clone(), 0..512usize, 0..1u64 << 20)
            .prop_map(|(table, entry, host)| Step::Change(table, entry, 1 << 63 | host << 16)),
        1 => any::<bool>().prop_map(Step::WriteBack),
        1 => table.prop_map(Step::Forget),
        1 => Just(Step::Clean),
    ];
    prop::collection::vec(step, 1..300)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever happens, a table shows what was last written to it, in memory or
    /// on disk, and the books are right.
    #[test]
    fn tables_show_what_was_written(steps in steps()) {
        let budget = Budget { max_bytes: 24 << 10, adaptive: false, holds_all: false };
        let codec = L2Codec::new(l2_geometry());
        let cache = TableCache::with_codec(codec, TABLE, budget);
        let mut disk: HashMap<u64, Vec<u8>> = HashMap::new();
        let mut memory: HashMap<u64, Vec<u8>> = HashMap::new();
        for step in steps {
            let load = |table: u64, disk: &HashMap<u64, Vec<u8>>| {
                let bytes = disk.get(&table).cloned().unwrap_or(vec![0; TABLE]);
                let load = cache.load(key(table), async { Ok(Buffer::copy_of(&bytes)) });
                load.now_or_never().unwrap().unwrap();
                bytes
            };
            match step {
                Step::Look(table) => {
                    let expected = load(table, &disk);
                    let expected = memory.get(&table).unwrap_or(&expected);
                    let seen = cache.with_content(key(table), |content| {
                        let mut bytes = vec![0; TABLE];
                        match content {
                            Content::Raw(raw) => bytes.copy_from_slice(raw),
                            Content::Packed(packed) => codec.unpack(packed, &mut bytes),
                        }
                        bytes
                    });
                    prop_assert_eq!(seen.as_ref(), Some(expected));
                }
                Step::Change(table, entry, word) => {
                    let before = load(table, &disk);
                    let bytes = memory.entry(table).or_insert(before);
                    let place = entry * 8..entry * 8 + 8;
                    bytes[place.clone()].copy_from_slice(&word.to_be_bytes());
                    cache
                        .update(key(table), |bytes| bytes[place].copy_from_slice(&word.to_be_bytes()))
                        .unwrap();
                }
                Step::WriteBack(written) => {
                    let copies = cache.begin_writeback();
                    if written {
                        for copy in &copies {
                            disk.insert(copy.key / TABLE as u64, copy.bytes.to_vec());
                        }
                        memory.clear();
                    }
                    cache.end_writeback(copies.iter().map(|copy| copy.key), written);
                    prop_assert_eq!(cache.is_clean(), memory.is_empty());
                }
                Step::Forget(table) => {
                    cache.forget(key(table));
                    memory.remove(&table);
                }
                Step::Clean => cache.drop_unused(),
            }
            let real: usize = cache
                .shards
                .iter()
                .map(|place| place.shard.lock().real_bytes())
                .sum();
            prop_assert_eq!(cache.used_bytes(), real);
            let dirty = cache.dirty.load(Ordering::Relaxed);
            prop_assert_eq!(dirty, memory.len());
            // Room is made for a table's bytes: what it takes to find it may stand above
            // the budget until the next load.
            let most = (24 << 10).max((dirty + 1) * (TABLE + 512) + 2048) + 2048;
            prop_assert!(real <= most, "{} bytes, {} dirty", real, dirty);
        }
    }
}

#[test]
fn a_cache_that_holds_all_tables_requests_a_commit_at_4_mib() {
    let budget = |holds_all| Budget {
        max_bytes: 256 << 10,
        adaptive: true,
        holds_all,
    };
    let cache = TableCache::with_codec(RawTables, TABLE, budget(false));
    for table in 0..40 {
        load_now(&cache, key(table), 1);
        cache.update(key(table), |bytes| bytes[0] = 2).unwrap();
    }
    assert!(cache.wants_writeback(), "half of the budget is dirty");
    cache.set_budget(budget(true));
    assert!(!cache.wants_writeback());
    for table in 40..=1024 {
        load_now(&cache, key(table), 1);
        cache.update(key(table), |bytes| bytes[0] = 2).unwrap();
    }
    assert!(cache.wants_writeback(), "more than 4 MiB are dirty");
    assert!(!cache.is_mostly_dirty());
}

//! Alignment, and locks of ranges of blocks on one lane.

use std::cell::RefCell;

use super::*;
use crate::lane::{block_on, yield_now};
use crate::spawn;

const SECTORS: Alignment = Alignment {
    request_bytes: 512,
    memory_bytes: 512,
};

#[test]
fn ranges_grow_and_shrink_to_blocks() {
    assert_eq!(SECTORS.around(513, 1), 512..1024);
    assert_eq!(SECTORS.around(512, 512), 512..1024);
    assert_eq!(SECTORS.inside(1, 2000), 512..1536);
    assert!(SECTORS.inside(1, 511).is_empty());
    assert!(SECTORS.inside(100, 200).is_empty());
    assert_eq!(Alignment::NONE.around(7, 9), 7..16);
}

#[test]
fn offset_length_and_memory_all_count() {
    let mut buffer = Buffer::zeroed(2048);
    assert!(SECTORS.fits(1024, std::slice::from_ref(&buffer)));
    assert!(!SECTORS.fits(1000, std::slice::from_ref(&buffer)));
    let head = buffer.split_to(100);
    assert!(!SECTORS.fits(0, &[head]));
    buffer.truncate(512);
    assert!(!SECTORS.fits(0, std::slice::from_ref(&buffer)));
    assert!(Alignment::NONE.fits(1, &[buffer]));
}

#[test]
fn overlapping_holds_take_turns() {
    let locks = std::rc::Rc::new(RangeLocks::default());
    let order = std::rc::Rc::new(RefCell::new(Vec::new()));
    block_on(async {
        let tasks = [(0..10, 1), (5..6, 2), (20..30, 3)].map(|(range, name)| {
            let (locks, order) = (locks.clone(), order.clone());
            spawn(async move {
                let _held = locks.lock_exclusive(range).await;
                order.borrow_mut().push((name, "in"));
                yield_now().await;
                yield_now().await;
                order.borrow_mut().push((name, "out"));
            })
        });
        for task in tasks {
            task.await;
        }
    });
    let order = order.borrow();
    let at = |event| order.iter().position(|other| *other == event);
    assert!(at((1, "out")) < at((2, "in")));
    assert!(at((3, "in")) < at((1, "out")));
}

/// What has happened so far, in order.
type Log = std::rc::Rc<RefCell<Vec<&'static str>>>;

#[test]
fn who_reads_a_block_to_write_it_meets_nobody_who_changes_it() {
    let locks = Arc::new(RangeLocks::default());
    let log = Log::default();
    let say = |text| log.borrow_mut().push(text);
    block_on(async {
        let first = locks.lock_shared(0..512).await;
        let (held, told) = (locks.clone(), log.clone());
        let alone = spawn(async move {
            let _held = held.lock_exclusive(0..512).await;
            told.borrow_mut().push("alone");
            yield_now().await;
            told.borrow_mut().push("done");
        });
        yield_now().await;
        say("first is still there");
        // Side by side with it where that is elsewhere, and after it where it is not.
        drop(locks.lock_shared(512..1024).await);
        say("elsewhere");
        let (passes, told) = (locks.clone(), log.clone());
        let second = spawn(async move {
            let _passing = passes.lock_shared(0..1024).await;
            told.borrow_mut().push("second");
        });
        yield_now().await;
        drop(first);
        alone.await;
        second.await;
        assert!(locks.try_lock_shared().is_some());
    });
    let expected = [
        "first is still there",
        "elsewhere",
        "alone",
        "done",
        "second",
    ];
    assert_eq!(*log.borrow(), expected);
}

#[test]
fn who_gives_up_waiting_leaves_nothing_behind() {
    let locks = Arc::new(RangeLocks::default());
    block_on(async {
        let held = locks.lock_exclusive(0..512).await;
        {
            let mut second = std::pin::pin!(locks.lock_exclusive(0..1));
            let mut third = std::pin::pin!(locks.lock_shared(0..512));
            assert!(futures_util::poll!(&mut second).is_pending());
            assert!(futures_util::poll!(&mut third).is_pending());
        }
        assert!(locks.try_lock_shared().is_none());
        drop(held);
        assert!(locks.try_lock_shared().is_some());
    });
}

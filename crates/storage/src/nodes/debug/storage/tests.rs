use vellum_io::lane::block_on;

use crate::MemStorage;
use crate::nodes::debug::debugger::HasDebugger;
use crate::nodes::debug::{Action, Injection, Rule};

use super::*;

fn quiet(_: &str) {}

fn storage(rules: Vec<Rule>, limits: Limits) -> (Arc<MemStorage>, DebugStorage) {
    let memory = Arc::new(MemStorage::with_bytes(vec![7; 16384]));
    let debugger = Debugger::new(rules, quiet);
    let debug = DebugStorage::new(memory.clone(), debugger, limits);
    (memory, debug)
}

fn ones(len: usize) -> Buffers {
    Buffers::from_iter([Buffer::copy_of(&vec![1; len])])
}

fn always(event: Event, kind: RequestKind, sector: Option<u64>) -> Rule {
    Rule {
        event,
        state: 0,
        action: Action::Inject(Injection {
            errno: libc::ENOSPC,
            kind: Some(kind),
            sector,
            once: false,
            immediately: false,
        }),
    }
}

#[test]
fn armed_errors_keep_requests_from_the_storage() {
    let rule = always(Event::None, RequestKind::Write, Some(2));
    let (memory, debug) = storage(vec![rule], Limits::default());
    block_on(async {
        let flags = WriteFlags::default();
        debug.write(0, ones(1024), flags).await.unwrap();
        let error = debug.write(1000, ones(100), flags).await.unwrap_err();
        assert_eq!(
            (error.errno(), error.offset_bytes()),
            (libc::ENOSPC, Some(1000))
        );
        debug.read(1024, ones(512)).await.unwrap();
    });
    assert_eq!(memory.snapshot()[1024], 7);
}

#[test]
fn small_writes_are_padded_and_large_ones_cut() {
    let limits = Limits {
        align_bytes: 4096,
        max_transfer_bytes: 4096,
        opt_write_zero_bytes: 8192,
        ..Limits::default()
    };
    // A write that was not padded would miss this sector.
    let rule = always(Event::PwritevRmwTail, RequestKind::Write, Some(8));
    let (memory, debug) = storage(vec![rule], limits);
    block_on(async {
        let flags = WriteFlags::default();
        debug.write(100, ones(4), flags).await.unwrap();
        let zeroes = ZeroFlags::default();
        debug.write_zeroes(8190, 4, zeroes).await.unwrap();
        let refused = ZeroFlags {
            no_fallback: true,
            ..zeroes
        };
        let error = debug.write_zeroes(4096, 4096, refused).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        debug.write_zeroes(0, 8192, refused).await.unwrap();
        debug.write(10, ones(10), flags).await.unwrap();
        let read = debug.read(5, ones(8190)).await.unwrap();
        assert_eq!((read[0][4], read[0][5], read[0][15]), (0, 1, 0));
        assert!(debug.write(4000, ones(1000), flags).await.is_err());
    });
    let bytes = memory.snapshot();
    assert_eq!((bytes[8193], bytes[8194]), (0, 7));
}

#[test]
fn neighbours_in_one_block_do_not_undo_each_other() {
    let limits = Limits {
        align_bytes: 512,
        ..Limits::default()
    };
    let (memory, debug) = storage(Vec::new(), limits);
    block_on(async {
        let writes: Vec<_> = (0..8)
            .map(|at| debug.write(at * 50, ones(50), WriteFlags::default()))
            .collect();
        for write in writes {
            write.await.unwrap();
        }
    });
    assert!(memory.snapshot()[..400].iter().all(|&byte| byte == 1));
}

#[test]
fn what_fills_a_block_waits_for_the_one_who_read_it_to_change_a_part() {
    let limits = Limits {
        align_bytes: 512,
        ..Limits::default()
    };
    let (memory, debug) = storage(Vec::new(), limits);
    let debugger = debug.debugger().unwrap();
    debugger.set_breakpoint(Event::PwritevRmwAfterHead, "read");
    block_on(async {
        let part = debug.write(10, ones(10), WriteFlags::default());
        debugger.wait_suspended("read").await;
        let twos = Buffers::from_iter([Buffer::copy_of(&[2; 1024])]);
        let whole = debug.write(0, twos, WriteFlags::default());
        for _ in 0..20 {
            lane::yield_now().await;
        }
        assert!(debugger.resume("read"));
        part.await.unwrap();
        whole.await.unwrap();
    });
    let bytes = memory.snapshot();
    let changed = bytes[..1024].iter().filter(|&&byte| byte == 2).count();
    assert!(changed == 1024 || changed == 1014, "{changed}");
}

#[test]
fn a_breakpoint_holds_until_it_is_resumed() {
    let (memory, debug) = storage(Vec::new(), Limits::default());
    let debugger = debug.debugger().unwrap();
    debugger.set_breakpoint(Event::Pwritev, "a");
    block_on(async {
        let held = debug.write(0, ones(512), WriteFlags::default());
        debugger.wait_suspended("a").await;
        debug
            .write(512, ones(512), WriteFlags::default())
            .await
            .unwrap();
        assert_eq!(memory.snapshot()[0], 7);
        assert!(!debugger.resume("b"));
        assert!(debugger.resume("a"));
        held.await.unwrap();
    });
    assert!(!debugger.is_suspended("a") && !debugger.remove_breakpoints("a"));
    assert_eq!(memory.snapshot()[..1024], [1; 1024]);
}

#[test]
fn no_rule_strikes_a_flush_of_nothing() {
    let rule = always(Event::None, RequestKind::Flush, None);
    let (_, debug) = storage(vec![rule], Limits::default());
    block_on(async {
        debug.flush().await.unwrap();
        debug.read(0, ones(512)).await.unwrap();
        debug.flush().await.unwrap();
        debug.discard(0, 512).await.unwrap();
        assert_eq!(debug.flush().await.unwrap_err().errno(), libc::ENOSPC);
    });
    // A change that fails may have changed something too.
    let rules = vec![
        always(Event::None, RequestKind::Flush, None),
        always(Event::None, RequestKind::Write, None),
    ];
    let (_, debug) = storage(rules, Limits::default());
    block_on(async {
        let failed = debug.write(0, ones(512), WriteFlags::default()).await;
        assert!(failed.is_err());
        assert!(debug.flush().await.is_err());
    });
}

#[test]
fn a_good_flush_covers_what_was_done_before() {
    let rule = always(Event::L1Update, RequestKind::Flush, None);
    let (_, debug) = storage(vec![rule], Limits::default());
    block_on(async {
        let flags = WriteFlags::default();
        debug.write(0, ones(512), flags).await.unwrap();
        debug.flush().await.unwrap();
        debug.debugger().unwrap().emit(Event::L1Update).await;
        debug.flush().await.unwrap();
        debug.truncate(32768).await.unwrap();
        assert!(debug.flush().await.is_err());
    });
}

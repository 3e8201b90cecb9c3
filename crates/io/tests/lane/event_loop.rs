//! Lanes in an event loop of somebody else's: here `poll(2)` on their descriptor.

use std::cell::Cell;
use std::future::Future;
use std::io::Write;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::join_all;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vellum_io::lane::net::Stream;
use vellum_io::lane::{self, LaneOptions, block_on};
use vellum_io::{Buffer, Buffers, Io, spawn, spawn_to_completion};

use crate::on_both;
use crate::tasks::{create, write};

/// A loop that gives the lane a turn whenever its descriptor says so, and no other.
struct Loop {
    fd: OwnedFd,
    /// Hears of changes of `fd` only, as tokio's loop does.
    edges: Option<OwnedFd>,
    turns: Cell<u32>,
}

/// Loops that look whether the descriptor is readable, and whether it has become so.
fn loops() -> [Loop; 2] {
    [false, true].map(|edge_triggered| {
        let fd = lane::fd().unwrap();
        let edges = edge_triggered.then(|| {
            let edges = epoll::create(CreateFlags::CLOEXEC).unwrap();
            let events = EventFlags::IN | EventFlags::ET;
            epoll::add(&edges, &fd, EventData::new_u64(0), events).unwrap();
            edges
        });
        let turns = Cell::new(0);
        Loop { fd, edges, turns }
    })
}

impl Loop {
    /// Whether the lane has something to do before `time` is over.
    fn is_readable(&self, time: Duration) -> bool {
        let time = Timespec::try_from(time).unwrap();
        if let Some(edges) = &self.edges {
            let mut events = [MaybeUninit::uninit(); 1];
            return !epoll::wait(edges, &mut events, Some(&time))
                .unwrap()
                .0
                .is_empty();
        }
        let mut set = [PollFd::new(&self.fd, PollFlags::IN)];
        poll(&mut set, Some(&time)).unwrap() > 0
    }

    fn turn(&self) {
        self.turns.set(self.turns.get() + 1);
        lane::turn();
    }

    fn run_until(&self, mut done: impl FnMut() -> bool) {
        while !done() {
            let woken = self.is_readable(Duration::from_secs(20));
            assert!(woken, "nothing woke the loop in 20 s");
            self.turn();
        }
    }

    /// Runs the loop until `future` is done, which is polled between the turns.
    fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        let mut value = None;
        self.run_until(|| {
            value = future.as_mut().now_or_never();
            value.is_some()
        });
        value.unwrap()
    }

    /// Asserts that the lane falls silent after a few turns.
    fn assert_falls_silent(&self) {
        for _ in 0..10 {
            if !self.is_readable(Duration::from_millis(30)) {
                return;
            }
            self.turn();
        }
        panic!("the descriptor stays readable though there is nothing to do");
    }
}

#[test]
fn files_timers_sockets_and_computations_go_on_by_turns() {
    on_both(|| {
        for event_loop in loops() {
            let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let file = create(&folder.path().join("file"), 0);
            let work = lane::spawn(async move {
                let writes = (0..100).map(|n| {
                    let buffers = Buffers::from_buf([Buffer::copy_of(&[n as u8; 512])]);
                    write(&file, n * 512, buffers)
                });
                for write in join_all(writes).await {
                    write.unwrap();
                }
                lane::sleep(Duration::from_millis(5)).await;
                let (one, other) = Stream::pair().unwrap();
                let reply = spawn(async move {
                    let (buffer, count) = other.recv(Buffer::for_read(8)).await.unwrap();
                    lane::sleep(Duration::from_millis(5)).await;
                    let reply = Buffer::copy_of(&buffer[..count]);
                    other.send(Buffers::from_buf([reply])).await.unwrap();
                });
                let hello = Buffers::from_buf([Buffer::copy_of(b"hello")]);
                one.send(hello).await.unwrap();
                let (_, count) = one.recv(Buffer::for_read(8)).await.unwrap();
                reply.await;
                assert_eq!(count, 5);
                assert!(lane::is_running());
                lane::compute(|| 6 * 7).await
            });
            assert!(!lane::is_running());
            assert_eq!(event_loop.wait(work), 42);
            event_loop.assert_falls_silent();
            let len_bytes = std::fs::metadata(folder.path().join("file")).unwrap().len();
            assert_eq!(len_bytes, 100 * 512);
        }
    });
}

#[test]
fn a_lane_that_waits_leaves_the_loop_alone() {
    on_both(|| {
        for event_loop in loops() {
            event_loop.assert_falls_silent();
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let woken = lane::spawn(async move { lane::poll_readable(ours.as_fd()).await });
            let start = Instant::now();
            event_loop.wait(lane::spawn(lane::sleep(Duration::from_millis(150))));
            assert!(start.elapsed() >= Duration::from_millis(150));
            event_loop.assert_falls_silent();
            assert!(event_loop.turns.get() < 30, "{:?}", event_loop.turns);
            theirs.write_all(b"x").unwrap();
            event_loop.wait(woken).unwrap();
            event_loop.assert_falls_silent();
        }
    });
}

#[test]
fn other_threads_wake_the_loop() {
    on_both(|| {
        for event_loop in loops() {
            let remote = lane::remote();
            let (calls, called) = std::sync::mpsc::channel();
            let caller = std::thread::spawn(move || {
                for n in 0..200_u64 {
                    let call = remote.call(move || async move {
                        if n % 50 == 0 {
                            lane::sleep(Duration::from_millis(1)).await;
                        }
                        Ok(n)
                    });
                    calls.send(call).unwrap();
                    if n % 10 == 0 {
                        std::thread::sleep(Duration::from_micros(100));
                    }
                }
            });
            for n in 0..200 {
                let call = called.recv().unwrap();
                assert_eq!(event_loop.wait(call).unwrap(), n);
            }
            caller.join().unwrap();
            event_loop.assert_falls_silent();
        }
    });
}

#[test]
fn what_starts_between_turns_is_not_forgotten() {
    on_both(|| {
        for event_loop in loops() {
            let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let file = create(&folder.path().join("file"), 0);
            event_loop.assert_falls_silent();

            // Requests of the loop's own, outside every task.
            let buffers = Buffers::from_buf([Buffer::copy_of(&[3; 512])]);
            event_loop.wait(write(&file, 0, buffers)).unwrap();
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let mut readable = lane::poll_readable(ours.as_fd());
            assert!((&mut readable).now_or_never().is_none());
            event_loop.assert_falls_silent();
            theirs.write_all(b"x").unwrap();
            event_loop.wait(readable).unwrap();

            // A timer that is earlier than the one that the lane waits for.
            let later = lane::spawn(lane::sleep(Duration::from_secs(3600)));
            event_loop.assert_falls_silent();
            event_loop.wait(lane::sleep(Duration::from_millis(20)));
            drop(later);
        }
    });
}

/// A request of several steps has to wait or not, which its caller cannot know.
#[test]
fn a_request_that_has_to_wait_may_start_outside_a_task() {
    on_both(|| {
        let waits = || async {
            lane::sleep(Duration::from_millis(1)).await;
            Ok(7)
        };
        let started = Io::start(waits());
        let completed = Io::task(spawn_to_completion(waits()));
        let both = async move { (started.await, completed.await) };
        let (started, completed) = block_on(both);
        assert_eq!((started.unwrap(), completed.unwrap()), (7, 7));
    });
}

#[test]
fn a_wait_that_is_dropped_between_turns_is_gone() {
    on_both(|| {
        for event_loop in loops() {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let dropped = lane::poll_readable(ours.as_fd());
            let kept = lane::poll_readable(ours.as_fd());
            event_loop.assert_falls_silent();
            drop(dropped);
            event_loop.assert_falls_silent();
            drop(kept);
            event_loop.assert_falls_silent();
            // Nobody waits for this any more.
            theirs.write_all(b"x").unwrap();
            event_loop.assert_falls_silent();
        }
    });
}

#[test]
fn both_directions_of_one_socket() {
    on_both(|| {
        for event_loop in loops() {
            let (one, other) = Stream::pair().unwrap();
            let received = lane::spawn(async move {
                let one = Rc::new(one);
                let sender = one.clone();
                let large = Buffers::from_buf([Buffer::copy_of(&vec![1; 4 << 20])]);
                let sent = spawn(async move { sender.send(large).await.map(drop) });
                let (_, count) = one.recv(Buffer::for_read(10)).await.unwrap();
                sent.await.unwrap();
                count
            });
            event_loop.assert_falls_silent();
            let peer = lane::spawn(async move {
                other
                    .send(Buffers::from_buf([Buffer::copy_of(b"12345")]))
                    .await
                    .unwrap();
                let mut total = 0;
                while total < 4 << 20 {
                    total += other.recv(Buffer::for_read(100_000)).await.unwrap().1;
                }
            });
            assert_eq!(event_loop.wait(received), 5);
            event_loop.wait(peer);
        }
    });
}

#[test]
fn blocking_between_turns_is_allowed_and_turns_inside_are_not() {
    on_both(|| {
        for event_loop in loops() {
            let count = Rc::new(Cell::new(0));
            let counted = count.clone();
            let task = lane::spawn(async move {
                for _ in 0..20 {
                    lane::sleep(Duration::from_millis(2)).await;
                    counted.set(counted.get() + 1);
                }
            });
            event_loop.run_until(|| count.get() >= 5);
            block_on(lane::sleep(Duration::from_millis(10)));
            let during_block = count.get();
            assert!((6..20).contains(&during_block), "{during_block}");
            event_loop.wait(task);
            assert_eq!(count.get(), 20);
            let nested = std::panic::catch_unwind(|| block_on(async { lane::turn() }));
            assert!(nested.is_err());
            let inside = lane::spawn(async { std::panic::catch_unwind(lane::turn).is_err() });
            assert!(event_loop.wait(inside));
            event_loop.assert_falls_silent();
        }
    });
}

#[test]
fn a_turn_ends_though_there_is_always_more() {
    on_both(|| {
        for event_loop in loops() {
            let stop = Rc::new(Cell::new(false));
            let stopped = stop.clone();
            let endless = lane::spawn(async move {
                while !stopped.get() {
                    lane::yield_now().await;
                }
            });
            for _ in 0..5 {
                assert!(event_loop.is_readable(Duration::ZERO));
                event_loop.turn();
            }
            stop.set(true);
            event_loop.wait(endless);
            event_loop.assert_falls_silent();
        }
    });
}

#[test]
fn a_file_is_always_ready() {
    on_both(|| {
        for event_loop in loops() {
            let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let ready = lane::spawn(async move { lane::poll_readable(file.as_fd()).await });
            event_loop.wait(ready).unwrap();
            event_loop.assert_falls_silent();
        }
    });
}

#[test]
fn more_requests_than_the_ring_holds_go_on_by_turns() {
    let options = LaneOptions {
        ring_entries: 2,
        ..LaneOptions::default()
    };
    let thread = std::thread::spawn(move || {
        lane::install(&options).unwrap();
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let file = create(&folder.path().join("file"), 0);
        let [event_loop, _] = loops();
        let writes: Vec<_> = (0..500)
            .map(|n| {
                let buffers = Buffers::from_buf([Buffer::copy_of(&[n as u8; 512])]);
                write(&file, n * 512, buffers)
            })
            .collect();
        let all = lane::spawn(async move {
            for write in join_all(writes).await {
                write.unwrap();
            }
        });
        event_loop.wait(all);
        let len_bytes = std::fs::metadata(folder.path().join("file")).unwrap().len();
        assert_eq!(len_bytes, 500 * 512);
    });
    thread.join().unwrap();
}

#[test]
fn a_descriptor_outlives_its_lane() {
    on_both(|| {
        let backend = lane::backend();
        let fd = std::thread::spawn(move || {
            lane::install(&LaneOptions {
                backend,
                ..LaneOptions::default()
            })
            .unwrap();
            let (ours, _theirs) = UnixStream::pair().unwrap();
            drop(lane::spawn(async move {
                lane::poll_readable(ours.as_fd()).await
            }));
            let fd = lane::fd().unwrap();
            lane::turn();
            fd
        })
        .join()
        .unwrap();
        let mut set = [PollFd::new(&fd, PollFlags::IN)];
        assert_eq!(poll(&mut set, Some(&Timespec::default())).unwrap(), 0);
    });
}

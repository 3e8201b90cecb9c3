//! The examples do what they say.

// The model of lanes has no descriptor for event loops.
#![cfg(not(shuttle))]
// Each is a program of its own beside that.
#![allow(dead_code)]

#[path = "../examples/blocking.rs"]
mod blocking;
#[path = "../examples/embed.rs"]
mod embed;
#[path = "../examples/epoll.rs"]
mod epoll;
#[path = "../examples/queue_threads.rs"]
mod queue_threads;
#[path = "../examples/tokio.rs"]
mod tokio_lane;

use std::path::Path;

use vellum::Result;

/// Runs an example on a new image, in a thread whose lane is its own.
fn run(example: fn(&Path) -> Result<()>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    let result = std::thread::spawn(move || example(&path)).join();
    result.expect("does not panic").unwrap();
}

#[test]
fn plain_threads_block() {
    run(blocking::run);
}

#[test]
fn the_first_example() {
    run(embed::run);
}

#[test]
fn a_loop_over_epoll() {
    run(epoll::run);
}

#[test]
fn threads_of_queues() {
    run(queue_threads::run);
}

#[test]
fn a_thread_of_tokio() {
    run(tokio_lane::run);
}

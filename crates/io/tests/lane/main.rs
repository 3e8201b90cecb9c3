//! Lanes: tasks, timers, wake-ups and sockets on both backends.

// The model has no descriptors.
#[cfg(not(shuttle))]
mod event_loop;
mod message;
mod net;
mod queue_entry;
mod tasks;
mod thread;

use vellum_io::lane::{self, Backend, LaneOptions};

/// Runs a test over both backends, each in a thread with a lane of its own.
fn on_both(test: fn()) {
    for backend in [Backend::IoUring, Backend::Threads] {
        let work = move || {
            lane::install(&LaneOptions {
                backend,
                ..LaneOptions::default()
            })
            .unwrap();
            assert_eq!(lane::backend(), backend);
            test();
        };
        if std::thread::spawn(work).join().is_err() {
            panic!("failed over {backend:?}");
        }
    }
}

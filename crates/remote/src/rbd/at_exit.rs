//! The end of the program while images are open or being closed.
//!
//! librbd's and librados' own memory goes when the program ends, whether or not threads of theirs
//! still use it: then these crash, and the program with them. So the end waits for images that are
//! being closed, which also write what their caches hold. Where others are open still, the program
//! ends without what would take that memory away; they have lost nothing that was flushed.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// How long the end of the program waits at most.
const LIMIT: Duration = Duration::from_secs(60);

static COUNTS: Mutex<Counts> = Mutex::new(Counts {
    open: 0,
    closing: 0,
});
static CHANGED: Condvar = Condvar::new();

struct Counts {
    /// Connections that are there.
    open: usize,
    /// Images that are being closed.
    closing: usize,
}

/// A connection that is there, or an image that is being closed, until it is dropped.
#[derive(Debug)]
pub(super) enum Counted {
    Open,
    Closing,
}

impl Counted {
    pub(super) fn open() -> Self {
        COUNTS.lock().open += 1;
        Counted::Open
    }

    pub(super) fn closing() -> Self {
        COUNTS.lock().closing += 1;
        Counted::Closing
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut counts = COUNTS.lock();
        match self {
            Counted::Open => counts.open -= 1,
            Counted::Closing => counts.closing -= 1,
        }
        CHANGED.notify_all();
    }
}

/// Waits for what is being closed; whether nothing is open then.
fn wait() -> bool {
    let until = Instant::now() + LIMIT;
    let mut counts = COUNTS.lock();
    while counts.closing > 0 && !CHANGED.wait_until(&mut counts, until).timed_out() {}
    counts.open == 0
}

/// Has the end of the program wait. To be called once, when the libraries are there: what is
/// registered last runs first.
#[cfg(target_env = "gnu")]
pub(super) fn register() {
    use std::ffi::c_void;

    unsafe extern "C" {
        fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
    }

    extern "C" fn end(status: c_int, _argument: *mut c_void) {
        if !wait() {
            // SAFETY: it does not return, and runs nothing more of this program.
            unsafe { libc::_exit(status) }
        }
    }

    // SAFETY: a function that is there as long as the program, with an argument that it ignores.
    // Without memory to note it nothing waits.
    unsafe { on_exit(end, std::ptr::null_mut()) };
}

/// Elsewhere the status is not told.
#[cfg(not(target_env = "gnu"))]
pub(super) fn register() {
    extern "C" fn end() {
        wait();
    }

    // SAFETY: a function that is there as long as the program.
    let _: c_int = unsafe { libc::atexit(end) };
}

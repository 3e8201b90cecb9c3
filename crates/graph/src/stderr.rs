//! Lines on standard error that nobody waits for: about an image in use, or a client.
//!
//! A supervisor may hand a server a pipe that it never reads. What an image or a client
//! has the program say must not stop it then: a line waits for space once, for a short time,
//! and is dropped if there is none; how many were is said as soon as there is space again.

use std::io::{Write, stderr};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vellum::qcow2::Messages;
use vellum_options::filename::without_passwords;

/// How long the first line waits that finds no space: a reader who is only slow loses none.
const PATIENCE: Timespec = Timespec {
    tv_sec: 2,
    tv_nsec: 0,
};
const NO_PATIENCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};
/// A pipe that has space at all has space for so many bytes.
const PIECE_BYTES: usize = 4096;

static QUEUE: Mutex<StderrQueue> = Mutex::new(StderrQueue { lost: 0 });
static EVERY_LINE: AtomicBool = AtomicBool::new(false);

/// How many lines were dropped.
struct StderrQueue {
    /// Lines that were dropped since the last one that was not.
    lost: u64,
}

impl StderrQueue {
    fn print(&mut self, out: &mut (impl Write + AsFd), line: &str, patience: &Timespec) {
        let patience = match self.lost {
            0 => patience,
            _ => &NO_PATIENCE,
        };
        let mut text = format!("{line}\n");
        if self.lost > 0 {
            let lost = self.lost;
            text.insert_str(
                0,
                &format!("({lost} lines were dropped: nobody read them)\n"),
            );
        }
        for piece in text.as_bytes().chunks(PIECE_BYTES) {
            if !has_room(out, patience) || out.write_all(piece).is_err() {
                self.lost += 1;
                return;
            }
        }
        self.lost = 0;
    }
}

/// Whether a piece can be written without waiting any longer.
fn has_room(out: &impl AsFd, patience: &Timespec) -> bool {
    let mut polled = [PollFd::new(out, PollFlags::OUT)];
    // Whatever else it says, a write says it too, and at once.
    !matches!(poll(&mut polled, Some(patience)), Ok(0))
}

/// How lines look, where somebody wants them otherwise.
static SHAPE: OnceLock<fn(&str) -> String> = OnceLock::new();

/// Sets how lines look; the first call decides.
pub fn set_shape(shape: fn(&str) -> String) {
    let _ = SHAPE.set(shape);
}

/// Prints a line on standard error, or drops it where nobody reads.
pub fn print_line(line: &str) {
    match SHAPE.get() {
        Some(shape) => print_shaped(&shape(line)),
        None => print_shaped(line),
    }
}

/// As [`print_line`], a line that looks as it is to.
pub fn print_shaped(line: &str) {
    let mut queue = QUEUE.lock();
    queue.print(&mut stderr().lock(), &without_passwords(line), &PATIENCE);
}

/// Has images that are opened from now on print every line of a repair, as QEMU's programs
/// do, and not only the first ones and how many there are.
pub fn print_every_line(every: bool) {
    EVERY_LINE.store(every, Ordering::Relaxed);
}

/// What images say goes to standard error.
pub(crate) fn messages() -> Messages {
    match EVERY_LINE.load(Ordering::Relaxed) {
        true => Messages::in_full(print_line),
        false => Messages::to(print_line),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_pipe_that_nobody_reads_stops_nobody() {
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        let mut queue = StderrQueue { lost: 0 };
        let patience = Timespec {
            tv_sec: 0,
            tv_nsec: 50_000_000,
        };
        let begun = Instant::now();
        let long = "x".repeat(3 * PIECE_BYTES);
        for number in 0..5000 {
            queue.print(&mut writer, &format!("line {number}"), &patience);
            queue.print(&mut writer, &long, &patience);
        }
        assert!(queue.lost > 4000);
        assert!(begun.elapsed().as_secs() < 30, "it waited for each of them");
        // Once there is space it tells of them.
        let lost = queue.lost;
        let mut read = vec![0; 1 << 20];
        let len = reader.read(&mut read).unwrap();
        assert!(read[..len].starts_with(b"line 0\nxxx"));
        queue.print(&mut writer, "last", &patience);
        assert_eq!(queue.lost, 0);
        drop(writer);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        assert!(rest.ends_with(&format!(
            "({lost} lines were dropped: nobody read them)\nlast\n"
        )));
    }
}

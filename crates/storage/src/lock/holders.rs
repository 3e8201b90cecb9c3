//! Whether a living process holds a lock.
//!
//! Locks of an open file, as QEMU takes them, name no process in `/proc/locks`. But the
//! kernel shows in `/proc/PID/fdinfo/FD` which locks are held through each open file, and
//! what a process was killed with (`SIGKILL`) or has left (its end) in its `stat` and
//! `status`. A lock that nobody shows belongs to an open file that only the kernel still
//! has: requests of a killed process that are not done yet.

use std::fs;
use std::io::{Error, ErrorKind};
use std::os::fd::RawFd;

/// A flag of `stat`: the thread is ending.
const EXITING: u32 = 0x4;
/// A flag of `stat`: the thread is the kernel's own.
const KERNEL_THREAD: u32 = 0x0020_0000;
/// The bit of `SIGKILL` in a set of signals.
const KILL_BIT: u64 = 1 << (libc::SIGKILL - 1);

/// A lock that somebody else holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HeldLock {
    /// The file, in the words of the kernel's lists of locks: `08:01:1234`.
    place: String,
    /// A byte that is locked.
    at_bytes: u64,
    /// The descriptor that wants the lock; what is held through it does not count.
    by: RawFd,
}

/// Who holds a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    /// A process that lives.
    Living,
    /// No process that lives.
    Nobody,
    /// None that may be asked; there are others.
    Unknown,
}

impl HeldLock {
    /// The lock on a byte of the file behind `fd`, through which some lock must be held
    /// now; `None` if the kernel does not tell.
    pub(super) fn note(fd: RawFd, at_bytes: u64) -> Option<HeldLock> {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()?;
        let own = info.lines().find_map(Lock::parse)?;
        Some(HeldLock {
            place: own.place.to_owned(),
            at_bytes,
            by: fd,
        })
    }

    /// Asks all processes. Takes about 10 µs for each of them.
    pub(super) fn holding(&self) -> Holder {
        let Ok(processes) = fs::read_dir("/proc") else {
            return Holder::Unknown;
        };
        let mut holding = Holder::Nobody;
        for process in processes.flatten() {
            let name = process.file_name();
            let Some(process) = name.to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            match self.is_held_by(process) {
                Ok(true) => return Holder::Living,
                Ok(false) => {}
                // It has ended meanwhile.
                Err(error) if error.kind() != ErrorKind::PermissionDenied => {}
                Err(_) => holding = Holder::Unknown,
            }
        }
        holding
    }

    fn is_held_by(&self, process: u32) -> Result<bool, Error> {
        let Some(thread) = living_thread(process)? else {
            return Ok(false);
        };
        for file in fs::read_dir(format!("{thread}/fdinfo"))? {
            let file = file?;
            let is_own = process == std::process::id()
                && file.file_name().to_str() == Some(&self.by.to_string());
            // A file that was closed meanwhile holds nothing.
            let info = fs::read_to_string(file.path()).unwrap_or_default();
            if !is_own && self.is_in(&info) {
                let status = fs::read_to_string(format!("{thread}/status"))?;
                return Ok(!is_killed(&status));
            }
        }
        Ok(false)
    }

    /// Whether a text of `fdinfo` speaks of the lock.
    fn is_in(&self, info: &str) -> bool {
        let mut locks = info.lines().filter_map(Lock::parse);
        locks.any(|lock| {
            lock.place == self.place && lock.start <= self.at_bytes && self.at_bytes <= lock.end
        })
    }
}

/// A lock as `fdinfo` shows it.
struct Lock<'a> {
    place: &'a str,
    start: u64,
    end: u64,
}

impl Lock<'_> {
    /// `lock: 1: OFDLCK ADVISORY READ -1 08:01:77 100 100`
    fn parse(line: &str) -> Option<Lock<'_>> {
        let words: Vec<&str> = line.strip_prefix("lock:")?.split_whitespace().collect();
        let [.., place, start, end] = words.as_slice() else {
            return None;
        };
        Some(Lock {
            place,
            start: start.parse().ok()?,
            end: match *end {
                "EOF" => u64::MAX,
                end => end.parse().ok()?,
            },
        })
    }
}

/// The folder of a thread of a process that is neither ending nor the kernel's own.
fn living_thread(process: u32) -> Result<Option<String>, Error> {
    for thread in fs::read_dir(format!("/proc/{process}/task"))? {
        let folder = format!("/proc/{process}/task/{}", thread?.file_name().display());
        let stat = fs::read_to_string(format!("{folder}/stat"))?;
        match flags(&stat) {
            Some(flags) if flags & KERNEL_THREAD != 0 => return Ok(None),
            Some(flags) if flags & EXITING != 0 => {}
            _ => return Ok(Some(folder)),
        }
    }
    Ok(None)
}

/// The flags in a text of `stat`: the ninth field. The second may hold anything.
fn flags(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(6)?.parse().ok()
}

/// Whether `SIGKILL` waits for a thread, by its `status`.
fn is_killed(status: &str) -> bool {
    let sets = status.lines().filter_map(|line| {
        let set = line
            .strip_prefix("SigPnd:")
            .or_else(|| line.strip_prefix("ShdPnd:"))?;
        u64::from_str_radix(set.trim(), 16).ok()
    });
    sets.fold(0, |all, set| all | set) & KILL_BIT != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(at_bytes: u64) -> HeldLock {
        HeldLock {
            place: "08:01:77".to_owned(),
            at_bytes,
            by: -1,
        }
    }

    #[test]
    fn locks_are_found_in_the_kernels_words() {
        let info = "pos:\t0\nflags:\t0100002\nmnt_id:\t30\nino:\t77\n\
                    lock:\t1: OFDLCK ADVISORY  READ -1 08:01:77 100 101\n\
                    lock:\t2: OFDLCK ADVISORY  READ -1 08:01:77 203 203\n";
        assert!(held(100).is_in(info) && held(101).is_in(info) && held(203).is_in(info));
        assert!(!held(102).is_in(info) && !held(201).is_in(info));
        assert!(!held(100).is_in(&info.replace(":77 ", ":7 ")));
        let whole = "lock:\t1: POSIX  ADVISORY  WRITE 889 08:01:77 0 EOF\n";
        assert!(held(u64::MAX - 1).is_in(whole));
    }

    #[test]
    fn threads_that_end_or_were_killed_are_told_by_the_kernels_words() {
        let stat = "12 (a) b) (c) D 1 12 12 0 -1 4194564 100 0 0 0";
        assert_eq!(flags(stat), Some(4_194_564));
        assert_ne!(flags(stat).unwrap() & EXITING, 0);
        let status = |own, shared| {
            format!(
                "Name:\tx\nSigPnd:\t{own:016x}\nShdPnd:\t{shared:016x}\nSigBlk:\t0000000000000100\n"
            )
        };
        assert!(!is_killed(&status(0, 1)));
        assert!(is_killed(&status(0x100, 0)) && is_killed(&status(0, 0x102)));
    }
}

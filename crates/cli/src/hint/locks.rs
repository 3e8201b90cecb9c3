//! Who holds locks on a file.
//!
//! Locks that belong to an open file, as QEMU's do, have no process in `/proc/locks`. But
//! the kernel shows in `/proc/PID/fdinfo/FD` the locks that are held through each open
//! file, so all processes are asked that let themselves be asked.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A process that holds a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    pub process: u32,
    /// Its name, as the kernel has it.
    pub program: String,
}

/// The processes that hold a lock on a file, but for this one.
pub fn holders(path: &Path) -> io::Result<Vec<Holder>> {
    let file = std::fs::metadata(path)?;
    let wanted = place(file.dev(), file.ino());
    let mut holders = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(process) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        if process != std::process::id() && holds(process, &wanted) {
            holders.push(Holder {
                process,
                program: program(process),
            });
        }
    }
    holders.sort_by_key(|holder| holder.process);
    Ok(holders)
}

/// A file as lists of locks name it: `08:01:1234`.
fn place(device: u64, inode: u64) -> String {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    format!("{major:02x}:{minor:02x}:{inode}")
}

/// Whether a process holds a lock; not if it cannot be told.
fn holds(process: u32, place: &str) -> bool {
    let Ok(files) = std::fs::read_dir(format!("/proc/{process}/fdinfo")) else {
        return false;
    };
    files
        .flatten()
        .filter_map(|file| std::fs::read_to_string(file.path()).ok())
        .any(|info| names_lock(&info, place))
}

/// Whether a text of `fdinfo` speaks of a lock on a file.
fn names_lock(info: &str, place: &str) -> bool {
    info.lines()
        .filter_map(|line| line.strip_prefix("lock:"))
        .any(|lock| lock.split_whitespace().any(|word| word == place))
}

fn program(process: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{process}/comm"));
    name.map_or_else(|_| "a program".to_owned(), |name| name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_found_in_the_kernels_words() {
        let info = "pos:\t0\nflags:\t0100002\nmnt_id:\t30\nino:\t77\n\
                    lock:\t1: OFDLCK ADVISORY  READ -1 08:01:77 100 100\n";
        assert!(names_lock(info, "08:01:77"));
        assert!(!names_lock(info, "08:01:7"));
        assert!(!names_lock("ino:\t08:01:77\n", "08:01:77"));
        assert_eq!(place(0x801, 77), "08:01:77");
    }
}

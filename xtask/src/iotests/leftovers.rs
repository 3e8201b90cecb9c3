//! What a test leaves behind: processes, also daemons, which come to us when their parents end, and
//! mounts of such. They are ended here.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// How often the tree of processes is searched before giving up, and how long between.
const ROUNDS: u32 = 250;
const PAUSE: Duration = Duration::from_millis(20);

/// The right to end whatever descends from this process.
#[derive(Debug)]
pub struct Leftovers(());

#[derive(Clone, Copy)]
struct Process {
    pid: u32,
    parent: u32,
}

impl Leftovers {
    /// From now on orphans among this process's descendants become its children.
    pub fn adopt() -> Result<Self> {
        // SAFETY: prctl with PR_SET_CHILD_SUBREAPER only sets a field of the calling process.
        let result = unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
        if result != 0 {
            return Err(std::io::Error::last_os_error()).context("cannot adopt orphans");
        }
        Ok(Self(()))
    }

    /// Takes note of orphans that have ended: some tests wait until a daemon's number is gone.
    pub fn reap_orphans(&self, child: u32) -> Result<()> {
        let own = std::process::id();
        for process in processes()? {
            if process.parent == own && process.pid != child {
                reap(process.pid);
            }
        }
        Ok(())
    }

    /// Ends the child and everything that descends from this process.
    pub fn end_all(&self, child: &mut Child) -> Result<()> {
        let _ = child.kill();
        child.wait()?;
        for _ in 0..ROUNDS {
            let left = descendants(&processes()?);
            if left.is_empty() {
                return Ok(());
            }
            for pid in left {
                // SAFETY: kill and waitpid have no memory effects here, and a descendant's number names no other
                // process until it is reaped, by its parent or by us.
                unsafe { libc::kill(pid.cast_signed(), libc::SIGKILL) };
                reap(pid);
            }
            std::thread::sleep(PAUSE);
        }
        bail!("processes of a test cannot be ended")
    }
}

/// Takes away what is mounted below a folder.
pub fn unmount_below(folder: &Path) -> Result<()> {
    let mounts = std::fs::read_to_string("/proc/self/mounts")?;
    for mountpoint in mountpoints_below(&mounts, folder) {
        rustix::mount::unmount(&mountpoint, rustix::mount::UnmountFlags::DETACH)
            .with_context(|| format!("cannot unmount {}", mountpoint.display()))?;
    }
    Ok(())
}

/// Those mounted last come first, since they may lie on the others.
fn mountpoints_below(mounts: &str, folder: &Path) -> Vec<PathBuf> {
    let places = mounts
        .lines()
        .rev()
        .filter_map(|line| line.split(' ').nth(1));
    let places = places.map(PathBuf::from);
    places.filter(|place| place.starts_with(folder)).collect()
}

fn reap(pid: u32) {
    // SAFETY: waitpid with a null status writes nowhere; of another's child it only tells that it is none of ours.
    unsafe { libc::waitpid(pid.cast_signed(), std::ptr::null_mut(), libc::WNOHANG) };
}

fn descendants(processes: &[Process]) -> Vec<u32> {
    let mut found = vec![std::process::id()];
    let mut next = 0;
    while next < found.len() {
        let parent = found[next];
        let children = processes.iter().filter(|p| p.parent == parent);
        found.extend(children.map(|process| process.pid));
        next += 1;
    }
    found.split_off(1)
}

fn processes() -> Result<Vec<Process>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else {
            continue;
        };
        // A process may end between the listing and here.
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        if let Some(parent) = parent(&stat) {
            all.push(Process { pid, parent });
        }
    }
    Ok(all)
}

/// The second field behind the name, which stands in brackets and may hold anything.
fn parent(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_below_a_folder_are_found_last_one_first() {
        let mounts = "/dev/a / ext4 rw 0 0\nx /t/1/s/a fuse rw 0 0\ny /t/1/s/b fuse rw 0 0\n\
                      z /t/10/s fuse rw 0 0\n";
        let found = mountpoints_below(mounts, Path::new("/t/1"));
        assert_eq!(found, [Path::new("/t/1/s/b"), Path::new("/t/1/s/a")]);
    }

    #[test]
    fn the_parent_is_found_behind_any_name() {
        assert_eq!(parent("12 (a) b) S 7 12 12 0"), Some(7));
        assert_eq!(parent("nothing"), None);
    }
}

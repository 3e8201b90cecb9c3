//! Exclusive claims on ranges of a file, which processes of one host make to each other.
//!
//! A claim belongs to the open file: two that were opened conflict, in one process too, and it ends
//! with the last descriptor, so with a process that dies.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;

use vellum_io::{Error, Result};

use crate::sys::{self, RangeLock};

fn set(file: &File, range: &Range<u64>, lock: RangeLock) -> Result<bool> {
    match sys::lock_range(file.as_raw_fd(), range, lock) {
        Ok(()) => Ok(true),
        Err(libc::EAGAIN | libc::EACCES) => Ok(false),
        Err(errno) => Err(Error::from_errno("lock", errno)),
    }
}

/// Claims a range of a file that is open for writing, which must not be empty, if no other open
/// file has any of it; does not wait. Says whether it is claimed.
///
/// # Errors
/// What the system says of the file: it may lie where there are no locks.
pub fn try_claim(file: &File, range: &Range<u64>) -> Result<bool> {
    set(file, range, RangeLock::Exclusive)
}

/// Claims a range together with others who do the same; nobody can claim it alone then.
///
/// # Errors
/// As [`try_claim`].
pub fn try_share(file: &File, range: &Range<u64>) -> Result<bool> {
    set(file, range, RangeLock::Shared)
}

/// Gives a range up.
pub fn release(file: &File, range: &Range<u64>) {
    // Of a file that is open it cannot fail.
    let _ = set(file, range, RangeLock::None);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_exclude_each_other_and_end_with_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "").unwrap();
        let open = || File::options().read(true).write(true).open(&path).unwrap();
        let (one, other) = (open(), open());
        assert!(try_claim(&one, &(0..10)).unwrap());
        assert!(!try_claim(&other, &(9..20)).unwrap());
        assert!(try_claim(&other, &(10..20)).unwrap());
        release(&one, &(5..10));
        assert!(try_share(&other, &(5..6)).unwrap());
        assert!(try_share(&one, &(5..6)).unwrap());
        assert!(!try_claim(&one, &(5..6)).unwrap());
        drop(one);
        assert!(try_claim(&other, &(0..6)).unwrap());
    }
}

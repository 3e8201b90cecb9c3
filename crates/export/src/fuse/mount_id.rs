//! Which mount is which. A path leads to whatever was mounted there last, so a mount is known by its id.
//!
//! Nothing here asks the file system of a mount anything: its server may be dead, or the caller.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::str;

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};

/// The mounts that this process sees.
const LIST: &str = "/proc/self/mountinfo";
/// `STATX_MNT_ID` of `linux/stat.h`, since Linux 5.8.
const WANTS_ID: StatxFlags = StatxFlags::from_bits_retain(0x1000);
/// `STATX_MNT_ID_UNIQUE`, since Linux 6.8.
const WANTS_UNIQUE_ID: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// The id of a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MountId {
    /// As [`LIST`] has it. When the mount is gone, another one may get it.
    listed: u64,
    /// Never given to another mount, where the kernel has such ids.
    unique: Option<u64>,
}

/// A mount as [`LIST`] has it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ListedMount {
    id: u64,
    /// Where it is now: a folder above may have been renamed.
    pub(super) path: PathBuf,
    /// The type of its file system.
    pub(super) kind: String,
}

impl MountId {
    /// The id of the uppermost mount at `path`; `None` where the kernel tells none.
    pub(super) fn at(path: &Path) -> Option<MountId> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let place = rustix::fs::open(path, flags, Mode::empty()).ok()?;
        let ask = |wanted: StatxFlags| {
            let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
            let told = rustix::fs::statx(&place, c"", flags, wanted).ok()?;
            (told.stx_mask & wanted.bits() != 0).then_some(told.stx_mnt_id)
        };
        Some(MountId {
            listed: ask(WANTS_ID)?,
            unique: ask(WANTS_UNIQUE_ID),
        })
    }

    /// The mount, if it is still there.
    pub(super) fn find(self) -> Option<ListedMount> {
        let list = fs::read(LIST).ok()?;
        let mut mounts = list.split(|&byte| byte == b'\n').filter_map(parse);
        mounts.find(|mount| mount.id == self.listed)
    }
}

/// Takes a line of the list apart: id, parent, device, root, path, options, optional fields, `-`, type.
fn parse(line: &[u8]) -> Option<ListedMount> {
    let mut fields = line.split(|&byte| byte == b' ');
    let id = str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let path = unescape(fields.nth(3)?);
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    Some(ListedMount {
        id,
        path,
        kind: String::from_utf8_lossy(kind).into_owned(),
    })
}

/// A path in which some bytes are written as a backslash and three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let digits = after.get(..3).filter(|_| first == b'\\');
        let digits = digits.and_then(|digits| str::from_utf8(digits).ok());
        let escaped = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(escaped.unwrap_or(first));
        rest = if escaped.is_some() {
            &after[3..]
        } else {
            after
        };
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_list_are_taken_apart() {
        let line = br"71 29 0:52 / /a\040b\134c rw,nosuid shared:9 master:2 - fuse.vellum x rw";
        let expected = ListedMount {
            id: 71,
            path: PathBuf::from(r"/a b\c"),
            kind: "fuse.vellum".to_owned(),
        };
        assert_eq!(parse(line), Some(expected));
        for odd in [
            &b""[..],
            b"71",
            b"x 29 0:52 / /a rw - fuse x rw",
            b"71 29 0:52 / /a rw",
        ] {
            assert_eq!(parse(odd), None);
        }
        assert_eq!(unescape(br"\9\04"), PathBuf::from(r"\9\04"));
    }

    #[test]
    fn the_mount_of_a_path_is_in_the_list() {
        let id = MountId::at(Path::new("/proc/self/mountinfo"));
        let found = id.and_then(MountId::find).expect("a mount");
        assert_eq!(
            (found.kind.as_str(), found.path.as_path()),
            ("proc", Path::new("/proc"))
        );
        assert_eq!(MountId::at(Path::new("/missing")), None);
    }
}

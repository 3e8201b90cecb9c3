//! The place where the disk appears: mounting over a file, and taking that away.
//!
//! A process that may mount does it itself; for others `fusermount3`, which may, does.
//!
//! Invariants:
//! - A mount ends at the latest when its [`Mount`] is dropped. One whose server has died without that
//!   is taken away by the next one in the same place.
//! - Only mounts of Vellum are taken away, and of those that are served only the caller's own: it is
//!   found by its id, not by the path, where something else may be mounted by now.

use std::ffi::CString;
use std::fs;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use vellum_io::{Error, ErrorKind, Result};

use super::mount_id::MountId;
use super::options::AllowOther;
use super::proto::MAX_TRANSFER_BYTES;

/// Where the kernel speaks to servers.
pub(super) const DEVICE: &str = "/dev/fuse";
/// What mounts of ours are called.
const TYPE: &str = "fuse.vellum";
/// Programs that mount for those who may not, newest first.
const HELPERS: [&str; 2] = ["fusermount3", "fusermount"];
/// So many dead mounts, one over the other, are taken away.
const REPAIRS_MAX: usize = 16;

/// Whether a mount says so whose server has died. It cancels requests while the kernel takes the
/// server's queues apart.
fn is_dead(errno: i32) -> bool {
    matches!(errno, libc::ENOTCONN | libc::ECONNABORTED | libc::ECANCELED)
}

/// What is mounted, and how.
#[derive(Debug)]
pub(super) struct Request<'a> {
    pub(super) mountpoint: &'a Path,
    /// What is shown there, for people.
    pub(super) source: &'a str,
    pub(super) allow_other: bool,
    /// The kernel refuses writers (`EROFS`) before they have opened anything.
    pub(super) read_only: bool,
}

/// A mount that is there.
#[derive(Debug)]
pub(super) struct Mount {
    mountpoint: PathBuf,
    /// `None` where the kernel tells none (before Linux 5.8).
    id: Option<MountId>,
    /// Nobody has taken it away yet.
    is_there: bool,
}

/// Checks that there is a regular file to mount over, and unmounts what dead servers have left.
///
/// # Errors
/// If there is none, or it is no regular file, in QEMU's words; what the system says.
pub(super) fn prepare(mountpoint: &Path) -> Result<()> {
    let shown = mountpoint.display();
    for _ in 0..REPAIRS_MAX {
        let error = match fs::metadata(mountpoint) {
            Ok(found) if found.is_file() => {
                // The kernel remembers what was there, also of a server that has died.
                match rustix::fs::statfs(mountpoint) {
                    Err(errno) if is_dead(errno.raw_os_error()) => errno.into(),
                    _ => return Ok(()),
                }
            }
            Ok(_) => {
                let message = format!("'{shown}' is not a regular file");
                return Err(Error::new(ErrorKind::InvalidArgument, "mount", message));
            }
            Err(error) => error,
        };
        let is_dead = error.raw_os_error().is_some_and(is_dead);
        let repaired = is_dead && is_ours(mountpoint) && unmount(mountpoint).is_ok();
        if !repaired {
            let text = format!("Failed to stat '{shown}'");
            return Err(Error::from_io("mount", &error).context("mount", text));
        }
    }
    let message = format!("'{shown}' lies below more dead mounts than can be taken away");
    Err(Error::new(ErrorKind::Io, "mount", message))
}

/// Takes away what servers that have died have left mounted at `mountpoint`. To be called before an image is
/// opened that may lie below: an image can be mounted over itself. What cannot be taken away, whoever uses
/// the path is told.
pub fn remove_dead_mounts(mountpoint: &Path) {
    for _ in 0..REPAIRS_MAX {
        // Other file systems are not asked: they may not answer.
        let asked = is_ours(mountpoint).then(|| rustix::fs::statfs(mountpoint));
        let is_dead = matches!(asked, Some(Err(errno)) if is_dead(errno.raw_os_error()));
        if !is_dead || unmount(mountpoint).is_err() {
            return;
        }
    }
}

/// Whether the uppermost mount at a path is one of Vellum.
fn is_ours(mountpoint: &Path) -> bool {
    let found = MountId::at(mountpoint).and_then(MountId::find);
    found.is_some_and(|mount| mount.kind == TYPE)
}

impl Mount {
    /// Mounts, and returns the descriptor that the kernel is spoken to through.
    ///
    /// # Errors
    /// What the system says; what to do where FUSE is not to be had.
    pub(super) fn new(request: &Request<'_>) -> Result<(Mount, OwnedFd)> {
        let device = match mount_directly(request) {
            // Not for us to do; or nobody can.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                mount_by_helper(request).map_err(|other| other.unwrap_or(error))
            }
            done => done,
        };
        let device = device
            .map_err(|error| error.context("mount", "Failed to mount FUSE session to export"))?;
        let mount = Mount {
            mountpoint: request.mountpoint.to_owned(),
            id: MountId::at(request.mountpoint),
            is_there: true,
        };
        Ok((mount, device))
    }

    /// Notes that somebody else has taken it away.
    pub(super) fn is_gone(&mut self) {
        self.is_there = false;
    }

    /// Takes it away. Whoever has the file open keeps it, as long as it is served. Below another mount it
    /// stays, dead: it is taken away by the server of that, or by the next one in the same place.
    pub(super) fn end(&mut self) {
        if !std::mem::replace(&mut self.is_there, false) {
            return;
        }
        let place = match self.id {
            None => Some(self.mountpoint.clone()),
            Some(id) => {
                let place = id.find().map(|mount| mount.path);
                place.filter(|place| MountId::at(place) == Some(id))
            }
        };
        if let Some(place) = place {
            // Somebody may have been faster.
            let _ = unmount(&place);
            remove_dead_mounts(&place);
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.end();
    }
}

/// Mounts as `allow_other` says; whether others may use it is the last of what is returned.
///
/// # Errors
/// As [`Mount::new`].
pub(super) fn mount(
    mountpoint: &Path,
    source: &str,
    allow_other: AllowOther,
    read_only: bool,
) -> Result<(Mount, OwnedFd, bool)> {
    let mount = |allow_other| {
        let (mount, descriptor) = Mount::new(&Request {
            mountpoint,
            source,
            allow_other,
            read_only,
        })?;
        Ok((mount, descriptor, allow_other))
    };
    match allow_other {
        AllowOther::Off => mount(false),
        AllowOther::On => mount(true),
        AllowOther::Auto => mount(true).or_else(|_| mount(false)),
    }
}

/// Opens the device.
///
/// # Errors
/// What the system says, and what to do.
pub(super) fn open_device() -> Result<OwnedFd> {
    let opened = fs::File::options().read(true).write(true).open(DEVICE);
    opened.map(OwnedFd::from).map_err(|error| {
        let missing = matches!(
            error.raw_os_error(),
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO)
        );
        let hint = match missing {
            true => {
                "Could not open '/dev/fuse': load the kernel's module (modprobe fuse), or pass \
                     the device into the container"
            }
            false => "Could not open '/dev/fuse'",
        };
        Error::from_io("mount", &error).context("mount", hint)
    })
}

fn mount_directly(request: &Request<'_>) -> Result<OwnedFd> {
    let device = open_device()?;
    let (user, group) = (rustix::process::getuid(), rustix::process::getgid());
    let options = format!(
        "fd={},rootmode={:o},user_id={user},group_id={group},{}",
        device.as_raw_fd(),
        libc::S_IFREG,
        options(request),
    );
    let options = CString::new(options).expect("numbers and words have no NUL");
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    if request.read_only {
        flags |= MountFlags::RDONLY;
    }
    rustix::mount::mount(
        request.source,
        request.mountpoint,
        TYPE,
        flags,
        options.as_c_str(),
    )
    .map_err(|errno| match errno {
        Errno::NODEV => Error::new(
            ErrorKind::Unsupported,
            "mount",
            "the kernel has no FUSE: load its module (modprobe fuse)",
        ),
        errno => Error::from_errno("mount", errno.raw_os_error()),
    })?;
    Ok(device)
}

fn options(request: &Request<'_>) -> String {
    let others = if request.allow_other {
        ",allow_other"
    } else {
        ""
    };
    format!("default_permissions,max_read={MAX_TRANSFER_BYTES}{others}")
}

/// Has a program mount that may; `Err(None)` if there is none.
fn mount_by_helper(request: &Request<'_>) -> std::result::Result<OwnedFd, Option<Error>> {
    // What is special in options.
    let source = request.source.replace('\\', "\\\\").replace(',', "\\,");
    let read_only = if request.read_only { "ro," } else { "" };
    let options = format!(
        "fsname={source},subtype=vellum,nosuid,nodev,noatime,{read_only}{}",
        options(request)
    );
    for helper in HELPERS {
        let pair = UnixStream::pair();
        let (ours, theirs) = pair.map_err(|error| Error::from_io("mount", &error))?;
        let mut command = Command::new(helper);
        // It sends the descriptor to its standard input, which the variable names.
        command
            .args(["-o", &options, "--"])
            .arg(request.mountpoint)
            .env("_FUSE_COMMFD", "0")
            .stdin(Stdio::from(OwnedFd::from(theirs)));
        let output = match command.output() {
            Ok(output) => output,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(Some(Error::from_io("mount", &error).target(helper))),
        };
        // The command holds the other end.
        drop(command);
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let error = Error::new(ErrorKind::PermissionDenied, "mount", said.trim());
            return Err(Some(error));
        }
        return receive_descriptor(&ours).map_err(Some);
    }
    Err(None)
}

fn receive_descriptor(socket: &UnixStream) -> Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )
    .map_err(|errno| Error::from_errno("mount", errno.raw_os_error()))?;
    let mut descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let missing = || {
        let message = "the program that mounts has sent no descriptor";
        Error::new(ErrorKind::Protocol, "mount", message)
    };
    descriptors.next().ok_or_else(missing)
}

/// Takes a mount away, also one that is in use.
fn unmount(mountpoint: &Path) -> Result<()> {
    let flags = UnmountFlags::DETACH;
    let errno = match rustix::mount::unmount(mountpoint, flags) {
        Ok(()) => return Ok(()),
        Err(errno) => errno,
    };
    let error = Error::from_errno("unmount", errno.raw_os_error());
    if errno != Errno::PERM {
        return Err(error);
    }
    let by = |helper: &&str| {
        let mut command = Command::new(helper);
        command.args(["-u", "-z", "--"]).arg(mountpoint);
        command.output().is_ok_and(|done| done.status.success())
    };
    match HELPERS.iter().any(by) {
        true => Ok(()),
        false => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_mounted_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = prepare(folder.path()).unwrap_err();
        assert!(error.message().ends_with("is not a regular file"));
        let missing = folder.path().join("missing");
        let error = prepare(&missing).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.message().starts_with("Failed to stat '"));
        let file = folder.path().join("file");
        fs::write(&file, []).expect("a file");
        prepare(&file).expect("a file to mount over");
    }
}

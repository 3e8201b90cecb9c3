//! Opening files and finding out what they are.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FileType, OFlags, SeekFrom, Stat};

use super::drop_behind::DropBehind;
use super::{Create, Device, File, FileKind, FileOptions, Supports};
use crate::copy_journal;
use crate::lock::{self, LockConflict, Permissions};
use crate::sys::{self, Errno};
use vellum_io::align::Alignment;
use vellum_io::error::errno_text;
use vellum_io::lane::Descriptor;
use vellum_io::{Buffer, Error, ErrorKind, Result};

/// `BLKROGET`: whether a block device is read-only.
const BLKROGET: libc::Ioctl = 0x125e_u32 as libc::Ioctl;
/// `BLKGETSIZE64`: a device's length in bytes.
const BLKGETSIZE64: libc::Ioctl = 0x8008_1272_u32 as libc::Ioctl;

/// The alignments that direct I/O may want, in bytes.
const CANDIDATES: [u32; 4] = [512, 1024, 2048, 4096];

/// What is taken if nothing else can be found out.
const SAFE_ALIGNMENT_BYTES: u32 = 4096;

/// A file that is open, and of which nothing was read or changed yet.
pub(super) struct OpenedFile {
    fd: OwnedFd,
    pub(super) name: String,
    stat: Stat,
    device: Option<Device>,
}

impl OpenedFile {
    /// Opens a file as `options` say, without its locks.
    pub(super) fn begin(path: &Path, options: &FileOptions) -> Result<OpenedFile> {
        OpenedFile::begin_as(path, path.display().to_string(), options)
    }

    /// As [`OpenedFile::begin`], under another name.
    pub(super) fn begin_as(path: &Path, name: String, options: &FileOptions) -> Result<OpenedFile> {
        let fd = open_fd(path, &name, options)?;
        OpenedFile::of(fd, name, options)
    }

    /// A file that somebody else has opened as `options` say.
    pub(super) fn of(fd: OwnedFd, name: String, options: &FileOptions) -> Result<OpenedFile> {
        let stat = sys::stat(&fd).map_err(|errno| {
            Error::from_errno("open", errno)
                .context("open", "Could not stat file")
                .target(&*name)
        })?;
        let device = find_kind(&fd, &stat, &name, options.kind)?;
        if !options.read_only && device.is_some() {
            refuse_read_only_device(&fd, &name)?;
        }
        Ok(OpenedFile {
            fd,
            name,
            stat,
            device,
        })
    }

    /// Takes its locks, of which it has none.
    pub(super) fn lock(&self, permissions: Permissions) -> Result<(), LockConflict> {
        let fd = self.fd.as_raw_fd();
        lock::change(fd, &self.name, Permissions::NONE, permissions)
    }

    /// Does what may be done only once the locks are held.
    pub(super) fn finish(self, options: &FileOptions) -> Result<File> {
        let OpenedFile {
            fd,
            name,
            stat,
            device,
        } = self;
        if !options.read_only && device.is_none() {
            copy_journal::end(&fd, &name)?;
        }
        if options.create == Create::Truncate && device.is_none() {
            sys::truncate(&fd, 0)
                .map_err(|errno| Error::from_errno("truncate", errno).target(&*name))?;
        }
        let alignment = match options.direct {
            true => find_alignment(&fd),
            false => Alignment::NONE,
        };
        let behind = match options.read_once_min_bytes {
            Some(min_bytes) if !options.direct && device.is_none() => {
                DropBehind::of(&fd, &stat, min_bytes)
            }
            _ => None,
        };
        let descriptor = Descriptor::direct(fd, name, alignment.request_bytes);
        Ok(File {
            descriptor: Arc::new(descriptor),
            alignment,
            device_and_inode: match device {
                Some(_) => (ALL_DEVICES, stat.st_rdev),
                None => (stat.st_dev, stat.st_ino),
            },
            device,
            read_only: options.read_only,
            no_flush: options.no_flush,
            discard: options.discard,
            ranges: Arc::default(),
            supports: Supports::new(),
            extents: Default::default(),
            through_cache: Arc::default(),
            behind,
        })
    }
}

/// The file system on which block devices lie, by their numbers: several nodes (`mknod`) may name one.
const ALL_DEVICES: u64 = u64::MAX;

/// Refuses to write to a block device that is read-only: the kernel opens it for writing, and fails the
/// writes.
fn refuse_read_only_device(fd: &OwnedFd, name: &str) -> Result<()> {
    // Other devices have no such flag.
    if sys::ioctl_get_u64(fd, BLKROGET).is_ok_and(|read_only| read_only != 0) {
        let message = format!(
            "Could not open '{name}': The device is not writable: {}; open it read-only, or make it \
             writable ('blockdev --setrw', 'losetup' without '-r')",
            errno_text(libc::EACCES)
        );
        let error = Error::new(ErrorKind::PermissionDenied, "open", message);
        return Err(error.with_errno(libc::EACCES).target(name));
    }
    Ok(())
}

fn open_fd(path: &Path, name: &str, options: &FileOptions) -> Result<OwnedFd> {
    let mut flags = OFlags::CLOEXEC;
    flags |= match options.read_only {
        true => OFlags::RDONLY,
        false => OFlags::RDWR,
    };
    if options.create != Create::No {
        flags |= OFlags::CREATE;
    }
    let refused = |errno: Errno| {
        let verb = if options.create == Create::No {
            "open"
        } else {
            "create"
        };
        let reason = errno_text(errno);
        let kind = Error::from_errno("open", errno).kind();
        Error::new(kind, "open", format!("Could not {verb} '{name}': {reason}"))
            .with_errno(errno)
            .target(name)
    };
    if !options.direct {
        return sys::open(path, flags).map_err(refused);
    }
    match sys::open(path, flags | OFlags::DIRECT) {
        Err(libc::EINVAL) if sys::open(path, flags).is_ok() => {
            let message = format!("Could not open '{name}': filesystem does not support O_DIRECT");
            Err(Error::new(ErrorKind::InvalidArgument, "open", message).target(name))
        }
        result => result.map_err(refused),
    }
}

/// Checks that the file is of the kind that is wanted; measures it if it is a
/// device.
fn find_kind(fd: &OwnedFd, stat: &Stat, name: &str, wanted: FileKind) -> Result<Option<Device>> {
    let invalid =
        |message: String| Err(Error::new(ErrorKind::InvalidArgument, "open", message).target(name));
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile | FileType::Directory if wanted == FileKind::Device => {
            invalid(format!(
                "'host_device' driver requires '{name}' to be either a character or block device"
            ))
        }
        FileType::RegularFile => Ok(None),
        FileType::BlockDevice | FileType::CharacterDevice if wanted != FileKind::Regular => {
            let measure = measure_device(fd);
            measure
                .map(Some)
                .map_err(|errno| Error::from_errno("open", errno).target(name))
        }
        _ => invalid(format!(
            "'file' driver requires '{name}' to be a regular file"
        )),
    }
}

fn measure_device(fd: &OwnedFd) -> Result<Device, Errno> {
    let len_bytes = match sys::ioctl_get_u64(fd, BLKGETSIZE64) {
        Ok(len) => len,
        // Not a block device: the end is where seeking says.
        Err(_) => sys::seek(fd, SeekFrom::End(0))?,
    };
    let request_bytes = sys::logical_block_bytes(fd)
        .unwrap_or(512)
        .max(512)
        .next_power_of_two();
    Ok(Device {
        len_bytes,
        blocks: Alignment {
            request_bytes,
            memory_bytes: request_bytes,
        },
    })
}

/// What direct I/O wants: the kernel's word, or else the first that works.
fn find_alignment(fd: &OwnedFd) -> Alignment {
    let sane = |bytes: u32| bytes.is_power_of_two() && bytes <= SAFE_ALIGNMENT_BYTES;
    match sys::direct_alignment(fd) {
        Some((memory_bytes, request_bytes)) if sane(memory_bytes) && sane(request_bytes) => {
            Alignment {
                request_bytes: request_bytes.max(512),
                memory_bytes,
            }
        }
        _ => probe_alignment(fd),
    }
}

/// Tries reads of growing length. An empty file accepts any, so there only the
/// safe choice is right.
fn probe_alignment(fd: &OwnedFd) -> Alignment {
    let reads = |len_bytes: u32| {
        let mut buffer = Buffer::for_read(len_bytes as usize);
        sys::read_first(fd, &mut buffer)
    };
    let trustworthy = reads(1).is_err();
    let found = CANDIDATES
        .into_iter()
        .find(|&candidate| reads(candidate).is_ok());
    let request_bytes = match found {
        Some(found) if trustworthy => found,
        _ => SAFE_ALIGNMENT_BYTES,
    };
    Alignment {
        request_bytes,
        memory_bytes: request_bytes,
    }
}

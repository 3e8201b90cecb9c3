//! The `file` and `host_device` drivers: options in, an open file out.

use std::sync::Arc;

use vellum::{Error, ErrorKind, Result, Storage};
use vellum_options::{Aio, OpenFlags, Options, Scalar};
use vellum_storage::file::{FileKind, FileOptions, FileStorage, Locks, large_file_bytes};
use vellum_storage::lock::{PermissionSet, Permissions};

/// What stands on the file; it decides how others are kept away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileUse {
    /// An image format with metadata.
    Format,
    /// The raw format: whoever shares the guest's data may share the file.
    Raw,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

/// A file that is open, but not yet protected from others.
#[derive(Debug, Clone)]
pub struct UnlockedFile {
    /// The file.
    pub file: Arc<FileStorage>,
    common: CommonOptions,
    locking: bool,
    /// What is used and not shared beyond what the use needs.
    extra: Permissions,
    /// The same file as it was open before, whose locks pass on.
    old: Option<Arc<FileStorage>>,
}

impl UnlockedFile {
    /// The same file for a user who writes to it or does not.
    ///
    /// # Errors
    /// If the node is read-only and `writable` is asked for.
    pub fn for_user(&self, writable: bool) -> Result<UnlockedFile> {
        if writable && !self.common.writable {
            return Err(invalid("Block node is read-only"));
        }
        let mut file = self.clone();
        file.common.writable = writable;
        Ok(file)
    }

    /// Whether it was opened for writing.
    pub fn is_writable(&self) -> bool {
        self.common.writable
    }

    /// Uses more of the file, and shares less of it, than its user needs.
    pub fn add_permissions(&mut self, used: PermissionSet, refused: PermissionSet) {
        self.extra.used = self.extra.used.with(used);
        self.extra.shared = self.extra.shared.without(refused);
    }

    /// Lets the file go as it was open before, and its locks.
    pub fn forget_old(&mut self) {
        self.old = None;
    }

    /// Takes the locks that a use needs. Waits, for some seconds, for those of a process
    /// that was killed and whose requests are not done.
    ///
    /// # Errors
    /// If another process holds locks that forbid the use.
    pub async fn lock(self, flags: &OpenFlags, user: FileUse) -> Result<Arc<FileStorage>> {
        if let Some(permissions) = self.permissions(flags, user) {
            match &self.old {
                Some(old) => self.file.take_over_locks(old, permissions).await?,
                None => self.file.set_permissions_patiently(permissions).await?,
            }
        }
        Ok(self.file)
    }

    /// As [`UnlockedFile::lock`], without waiting.
    ///
    /// # Errors
    /// If another process holds locks that forbid the use.
    pub fn lock_at_once(self, flags: &OpenFlags, user: FileUse) -> Result<Arc<FileStorage>> {
        if let Some(permissions) = self.permissions(flags, user) {
            match &self.old {
                Some(old) => self.file.take_over_locks_at_once(old, permissions)?,
                None => self.file.set_permissions(permissions)?,
            }
        }
        Ok(self.file)
    }

    /// Gives back the locks of a use that is over. Whoever comes next takes them again.
    pub(crate) fn unlock(&self) {
        // Nothing that is given back can be in anybody's way.
        let _ = self.file.set_permissions(Permissions::NONE);
    }

    fn permissions(&self, flags: &OpenFlags, user: FileUse) -> Option<Permissions> {
        if !self.locking {
            // `locking=off`: the user says so.
            return None;
        }
        let mut permissions = permissions(flags, &self.common, user);
        permissions.used = permissions.used.with(self.extra.used);
        let refused = PermissionSet::ALL.without(self.extra.shared);
        permissions.shared = permissions.shared.without(refused);
        match (user, self.file.permissions()) {
            // A format that stands on the same file needs its own still.
            (FileUse::Raw, Some(held)) => Some(permissions.both(held)),
            _ => Some(permissions),
        }
    }
}

/// Opens the file that `options` name without any locks. If it is one of `kept`, it is that file, and
/// the locks of that one pass on.
///
/// # Errors
/// If an option is wrong or unknown, or the file cannot be opened.
pub fn open_unlocked(
    mut options: Options,
    flags: &OpenFlags,
    kept: &[Arc<FileStorage>],
) -> Result<UnlockedFile> {
    let driver = options.take_text("driver")?;
    let kind = match driver.as_deref() {
        None => FileKind::Any,
        Some("file") => FileKind::Regular,
        Some("host_device" | "host_cdrom") => FileKind::Device,
        Some(other) => return Err(unknown_driver(other)),
    };
    let name = driver.unwrap_or_else(|| "file".to_owned());
    let filename = options.take_text("filename")?;
    let Some(filename) = filename.filter(|filename| !filename.is_empty()) else {
        return Err(invalid(format!(
            "The '{name}' block driver requires a file name"
        )));
    };
    let common = CommonOptions::take(&mut options, flags)?;
    let aio = take_aio(&mut options)?.or(flags.aio);
    if aio == Some(Aio::Native) && !common.direct {
        return Err(invalid(
            "aio=native was specified, but it requires cache.direct=on, which was not specified.",
        ));
    }
    let locking = take_locking(&mut options)?;
    for accepted in [
        "x-check-cache-dropped",
        "drop-cache",
        "aio-max-batch",
        "pr-manager",
    ] {
        options.take(accepted);
    }
    if let Some(unknown) = options.keys().next() {
        return Err(invalid(format!(
            "Block protocol '{name}' doesn't support the option '{unknown}'"
        )));
    }
    let settings = FileOptions::default()
        .read_only(!common.writable)
        .direct(common.direct)
        .kind(kind)
        .no_flush(common.no_flush)
        .discard(common.discard)
        .read_once_min_bytes(flags.read_once.then(large_file_bytes))
        // Which locks, the use decides: see `Unlocked::lock`.
        .locks(Locks::Unlocked);
    let old = kept.iter().find(|old| old.name() == filename).cloned();
    let open = |settings: &FileOptions| match &old {
        Some(old) => old.open_anew(settings),
        None => FileStorage::open(&filename, settings),
    };
    let mut common = common;
    let file = match open(&settings) {
        Err(error) if common.writable && common.auto_read_only && is_not_writable(&error) => {
            common.writable = false;
            open(&settings.read_only(true))
        }
        opened => opened,
    };
    let file = file.map_err(|error| as_driver(error, &name))?;
    Ok(UnlockedFile {
        file,
        common,
        locking,
        extra: Permissions::NONE,
        old,
    })
}

/// Whether a file may still be read.
fn is_not_writable(error: &Error) -> bool {
    matches!(error.errno(), libc::EACCES | libc::EPERM | libc::EROFS)
}

/// The storage knows two kinds of files; the user may have named a third driver.
fn as_driver(error: Error, driver: &str) -> Error {
    let message = error.message();
    match message.strip_prefix("'host_device'") {
        Some(rest) if driver != "host_device" => {
            let message = format!("'{driver}'{rest}");
            Error::new(error.kind(), "open", message).with_errno(error.errno())
        }
        _ => error,
    }
}

/// What a node does not support, in QEMU's words.
pub fn unknown_driver(name: &str) -> Error {
    invalid(format!("Unknown driver '{name}'"))
}

/// Options that every node has. What is not given is inherited.
#[derive(Debug, Clone, Copy)]
pub struct CommonOptions {
    /// Writes are possible.
    pub writable: bool,
    /// Bypass the page cache.
    pub direct: bool,
    /// Ignore flushes.
    pub no_flush: bool,
    /// Discards are passed on.
    pub discard: bool,
    /// Take no conflicting locks.
    pub force_share: bool,
    /// Open a file read-only if it cannot be opened for writing.
    pub auto_read_only: bool,
}

/// Where they are.
const COMMON_KEYS: [&str; 6] = [
    "read-only",
    "auto-read-only",
    "discard",
    "cache.direct",
    "cache.no-flush",
    "force-share",
];

impl CommonOptions {
    /// Takes them out of a node's options.
    ///
    /// # Errors
    /// If one of them has no valid value.
    pub fn take(options: &mut Options, inherited: &OpenFlags) -> Result<CommonOptions> {
        let common = CommonOptions::of(options, inherited)?;
        options.take_text("node-name")?;
        for key in COMMON_KEYS {
            options.take(key);
        }
        Ok(common)
    }

    /// Those that a node's options say.
    ///
    /// # Errors
    /// If one of them has no valid value.
    pub fn of(options: &Options, inherited: &OpenFlags) -> Result<CommonOptions> {
        let read_only = options
            .get_bool("read-only")?
            .unwrap_or(!inherited.writable);
        let discard = match options.get("discard") {
            None => inherited.discard,
            Some(Scalar::Text(text)) => match text.as_str() {
                "unmap" | "on" => true,
                "ignore" | "off" => false,
                _ => return Err(invalid("Invalid discard option")),
            },
            Some(_) => return Err(invalid("Invalid discard option")),
        };
        let is_writable = !read_only && !inherited.inactive;
        let common = CommonOptions {
            writable: is_writable,
            direct: options
                .get_bool("cache.direct")?
                .unwrap_or(inherited.cache.direct),
            no_flush: options
                .get_bool("cache.no-flush")?
                .unwrap_or(inherited.cache.no_flush),
            discard,
            auto_read_only: options
                .get_bool("auto-read-only")?
                .unwrap_or(inherited.auto_read_only),
            force_share: options
                .get_bool("force-share")?
                .unwrap_or(inherited.force_share),
        };
        if common.force_share && !read_only {
            return Err(invalid(
                "force-share=on can only be used with read-only images",
            ));
        }
        Ok(CommonOptions {
            force_share: common.force_share || inherited.inactive,
            ..common
        })
    }

    /// The flags that nodes below inherit.
    pub fn child_flags(&self, flags: &OpenFlags) -> OpenFlags {
        let mut flags = flags.clone();
        flags.writable = self.writable;
        flags.cache.direct = self.direct;
        flags.cache.no_flush = self.no_flush;
        flags.discard = self.discard;
        flags.force_share = self.force_share;
        flags.auto_read_only = self.auto_read_only;
        flags
    }
}

fn take_aio(options: &mut Options) -> Result<Option<Aio>> {
    match options.take_text("aio")? {
        None => Ok(None),
        Some(name) => match Aio::parse(&name) {
            Some(aio) => Ok(Some(aio)),
            None => Err(invalid(format!("invalid parameter value: {name}"))),
        },
    }
}

fn take_locking(options: &mut Options) -> Result<bool> {
    match options.take_text("locking")?.as_deref() {
        None | Some("auto" | "on") => Ok(true),
        Some("off") => Ok(false),
        Some(other) => Err(invalid(format!("invalid parameter value: {other}"))),
    }
}

/// The locks of a file, as QEMU's tools take them.
fn permissions(flags: &OpenFlags, common: &CommonOptions, user: FileUse) -> Permissions {
    let mut permissions = match (user, common.writable) {
        (FileUse::Format, true) => Permissions::WRITER,
        (FileUse::Format, false) => Permissions::READER,
        // QEMU denies others a change of the length for exports only. But nobody who copies
        // or commits a raw image expects its end to move.
        (FileUse::Raw, true) => Permissions::RAW_WRITER,
        (FileUse::Raw, false) => Permissions::RAW_READER,
    };
    if flags.no_share {
        permissions.shared = Permissions::READER.shared;
    }
    if flags.resize {
        permissions.used = permissions.used.with(PermissionSet::RESIZE);
    }
    if flags.metadata_only {
        permissions.used = permissions.used.without(PermissionSet::CONSISTENT_READ);
    }
    // A file with a name may be active below an inactive format.
    if common.force_share || flags.inactive {
        permissions.shared = PermissionSet::ALL;
    }
    permissions
}

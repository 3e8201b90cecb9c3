//! What all file systems have in common.

use crate::error::Result;

/// A file, by its place in the file system. [`ROOT`] is the root directory's.
pub type Id = u64;

/// The root directory.
pub const ROOT: Id = 1;

/// Longest name in bytes; what is longer is not shown.
const NAME_BYTES_MAX: usize = 255;

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// A device that is used byte by byte.
    CharacterDevice,
    /// A device that is used in blocks.
    BlockDevice,
    /// A pipe with a name.
    Fifo,
    /// A socket.
    Socket,
}

impl Kind {
    /// The bits of a file's mode that tell its kind.
    pub fn mode(self) -> u32 {
        match self {
            Kind::Fifo => 0o010_000,
            Kind::CharacterDevice => 0o020_000,
            Kind::Directory => 0o040_000,
            Kind::BlockDevice => 0o060_000,
            Kind::File => 0o100_000,
            Kind::Link => 0o120_000,
            Kind::Socket => 0o140_000,
        }
    }

    /// The kind that a mode tells, if there is such a kind.
    pub(crate) fn of_mode(mode: u32) -> Option<Kind> {
        let all = [
            Kind::File,
            Kind::Directory,
            Kind::Link,
            Kind::CharacterDevice,
            Kind::BlockDevice,
            Kind::Fifo,
            Kind::Socket,
        ];
        all.into_iter().find(|kind| kind.mode() == mode & 0o170_000)
    }
}

/// A point in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Time {
    /// Since 1970, in UTC.
    pub seconds: i64,
    /// Of the second that began.
    pub nanoseconds: u32,
}

/// What is known of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attributes {
    /// What it is.
    pub kind: Kind,
    /// Who may do what: the lowest twelve bits of its mode.
    pub permissions: u32,
    /// Its number, for people.
    pub inode: u64,
    /// How many names it has.
    pub links: u32,
    /// User and group; `None` where the file system has no such thing.
    pub owner: Option<(u32, u32)>,
    /// Of a device: its number, as the kernel writes it in 32 bits.
    pub device: u32,
    /// Its length in bytes.
    pub size_bytes: u64,
    /// What it takes on the disk, in units of 512 bytes.
    pub blocks: u64,
    /// When it was read.
    pub accessed: Time,
    /// When its content was changed.
    pub modified: Time,
    /// When it was changed in any way.
    pub changed: Time,
}

/// A name in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The name: neither empty nor `.` nor `..`, without `/` and NUL, 255 bytes at most.
    pub name: &'a [u8],
    /// The file.
    pub id: Id,
    /// What it is, where the directory tells.
    pub kind: Option<Kind>,
    /// Where the names behind this one begin: more than zero, and at most `i64::MAX - 2`.
    pub next: u64,
}

/// A file system that is read. Whatever is asked for, any number of threads may ask.
///
/// # Errors
/// A file that is damaged gives [`Error::Damaged`](crate::Error::Damaged), and harms no other
/// one.
pub trait FileSystem: Send + Sync {
    /// What users are to know of it, such as that it was not unmounted.
    fn remarks(&self) -> &[String] {
        &[]
    }

    /// The size in bytes of its blocks, how many it has, and how many of them are free.
    fn blocks(&self) -> (u32, u64, u64);

    /// What is known of a file.
    ///
    /// # Errors
    /// See [`FileSystem`].
    fn attributes(&self, file: Id) -> Result<Attributes>;

    /// The file that `name` means in a directory, if there is one.
    ///
    /// # Errors
    /// See [`FileSystem`].
    fn lookup(&self, directory: Id, name: &[u8]) -> Result<Option<Id>>;

    /// Gives the names in a directory to `take`, from `from` on, until that returns `false`:
    /// 0, or what the name before has as [`Entry::next`].
    ///
    /// # Errors
    /// See [`FileSystem`]. Names before the damage were given.
    fn list(
        &self,
        directory: Id,
        from: u64,
        take: &mut dyn FnMut(&Entry<'_>) -> bool,
    ) -> Result<()>;

    /// Reads from a regular file; fewer bytes than there is room for only at its end.
    ///
    /// # Errors
    /// See [`FileSystem`].
    fn read(&self, file: Id, offset_bytes: u64, bytes: &mut [u8]) -> Result<usize>;

    /// Where a symbolic link leads: 4095 bytes at most, without NUL.
    ///
    /// # Errors
    /// See [`FileSystem`].
    fn read_link(&self, file: Id) -> Result<Vec<u8>>;
}

/// Whether a name may be shown.
pub(crate) fn is_sound_name(name: &[u8]) -> bool {
    !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && name != b"."
        && name != b".."
        && !name.iter().any(|byte| matches!(byte, b'/' | 0))
}

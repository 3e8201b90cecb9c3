//! [`OpenFlags`]: how an image is to be used.

use vellum::qcow2::CompressionOptions;
use vellum::qcow2::seal::VerifyReads;
use vellum_io::lane;

use crate::cache::CacheMode;

/// How requests on files run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aio {
    /// Blocking calls on threads.
    Threads,
    /// Linux AIO; served by io_uring here.
    Native,
    /// io_uring.
    IoUring,
}

impl Aio {
    /// The backend of a name as `-i` and `--aio` take it.
    pub fn parse(name: &str) -> Option<Aio> {
        match name {
            "threads" => Some(Aio::Threads),
            "native" => Some(Aio::Native),
            "io_uring" => Some(Aio::IoUring),
            _ => None,
        }
    }

    /// The backend of the lanes that serve it.
    pub fn lane_backend(self) -> lane::Backend {
        match self {
            Aio::Threads => lane::Backend::Threads,
            Aio::Native | Aio::IoUring => lane::Backend::IoUring,
        }
    }
}

/// What to do with writes of zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DetectZeroes {
    /// Write them like anything else.
    #[default]
    Off,
    /// Turn them into zero requests.
    On,
    /// Turn them into zero requests that may give space back.
    Unmap,
}

impl DetectZeroes {
    /// The mode of a name as `--detect-zeroes` takes it.
    pub fn parse(name: &str) -> Option<DetectZeroes> {
        match name {
            "off" => Some(DetectZeroes::Off),
            "on" => Some(DetectZeroes::On),
            "unmap" => Some(DetectZeroes::Unmap),
            _ => None,
        }
    }
}

/// How an image is to be used. Options of the image itself (`--image-opts`,
/// `json:`) win over these.
#[derive(Debug, Clone)]
pub struct OpenFlags {
    /// Writes are wanted.
    pub writable: bool,
    /// The cache mode.
    pub cache: CacheMode,
    /// How requests run; `None` takes the default.
    pub aio: Option<Aio>,
    /// Discards give space back (`discard=unmap`) rather than doing nothing.
    pub discard: bool,
    /// What to do with writes of zeroes.
    pub detect_zeroes: DetectZeroes,
    /// Take no lock that another process could conflict with (`-U`).
    pub force_share: bool,
    /// A file that cannot be written is opened read-only (`auto-read-only=on`).
    pub auto_read_only: bool,
    /// Somebody else may write to the image: nothing is written here, and no lock is taken that
    /// would keep him away. Of nodes that can be changed while they are used.
    pub inactive: bool,
    /// Keep writers away even where the format would let them be (the source of
    /// a conversion).
    pub no_share: bool,
    /// The size is going to be changed: a raw image is locked for that from the start.
    pub resize: bool,
    /// From so many layers below the image on, take no lock that could conflict with
    /// somebody who writes there: the one who asks does that himself (a commit).
    pub unlocked_from: Option<u32>,
    /// Keep in the image what is read from its backing file (`-C`).
    pub copy_on_read: bool,
    /// Leave the backing file alone.
    pub no_backing: bool,
    /// What is read is not read again soon (the source of a copy): large files need not stay
    /// in the page cache.
    pub read_once: bool,
    /// Only metadata is wanted: neither backing file nor data file is opened.
    pub metadata_only: bool,
    /// How compressed clusters are written.
    pub compression: CompressionOptions,
    /// Where clusters go depends on the requests alone.
    pub reproducible: bool,
    /// The image is going to be checked: it is opened as it is, dirty or corrupt.
    pub for_check: bool,
    /// Whether reads of sealed images are verified, where their options do not say.
    pub verify: Option<VerifyReads>,
    /// Guest data will not be read: encrypted images need no key.
    pub no_data: bool,
    /// Hears warnings for the user, with the ends of their lines.
    pub warn: fn(&str),
    /// Prints what nodes report on standard output (`blkdebug`'s breakpoints).
    pub print: fn(&str),
}

impl Default for OpenFlags {
    fn default() -> Self {
        OpenFlags {
            writable: false,
            cache: CacheMode::default(),
            aio: None,
            discard: false,
            detect_zeroes: DetectZeroes::Off,
            force_share: false,
            auto_read_only: false,
            inactive: false,
            no_share: false,
            resize: false,
            unlocked_from: None,
            copy_on_read: false,
            no_backing: false,
            read_once: false,
            metadata_only: false,
            compression: CompressionOptions::default(),
            reproducible: false,
            for_check: false,
            no_data: false,
            verify: None,
            warn: |message| eprint!("{message}"),
            print: |message| println!("{message}"),
        }
    }
}

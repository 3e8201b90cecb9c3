//! What is told of an image beside its bytes: [`Facts`] for `info`, [`CheckReport`] for `check`.

use std::ops::Range;

/// What an image says of itself. A device of this crate gives it as its
/// [`format_device`](vellum::BlockDevice::format_device).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// The backing file, as the image names it.
    pub backing: Option<BackingName>,
    /// What QEMU tells as the format's own, in its order.
    pub specific: Vec<(&'static str, Fact)>,
    /// It was left in disorder.
    pub is_dirty: bool,
    /// What it holds cannot be read without a key.
    pub is_encrypted: bool,
    /// Whether whole clusters can be written compressed.
    pub compression: CompressedWrites,
    /// Its dirty bitmaps, where it is only read.
    pub bitmaps: Vec<StoredBitmap>,
}

/// A dirty bitmap that an image holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredBitmap {
    /// Its name.
    pub name: String,
    /// Bytes that a bit stands for: a power of two.
    pub granularity_bytes: u64,
    /// What it calls dirty, in bytes of the disk, in order.
    pub dirty: Vec<Range<u64>>,
}

/// What an image does with [`BlockDevice::write_compressed`](vellum::BlockDevice::write_compressed).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CompressedWrites {
    /// It has no compressed clusters.
    #[default]
    No,
    /// It takes either kind.
    Also,
    /// It takes nothing else.
    Only,
}

/// A file that an image stands on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingName {
    /// Its name, in the image's own words.
    pub name: String,
    /// Its format, where the image says one.
    pub format: Option<String>,
}

impl BackingName {
    /// A file of this host by a path that another program has written, with backslashes maybe. It stays a path whatever
    /// stands there: what looks like a protocol (`nbd://...`, `json:{...}`, also `D:/...`) is not one.
    pub(crate) fn of_path(path: &str, format: &str) -> Self {
        let path = path.replace('\\', "/");
        let has_protocol = path
            .split('/')
            .next()
            .is_some_and(|first| first.contains(':'));
        BackingName {
            name: if has_protocol {
                format!("./{path}")
            } else {
                path
            },
            format: Some(format.to_owned()),
        }
    }
}

/// A value of [`Facts::specific`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fact {
    /// A text.
    Text(String),
    /// A number.
    Number(u64),
    /// Yes or no.
    Bool(bool),
    /// Several of one kind, each with members of its own.
    List(Vec<Vec<(&'static str, Fact)>>),
}

/// What a check is to mend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fix {
    /// Space that nothing leads to.
    pub leaks: bool,
    /// Everything else.
    pub corruptions: bool,
}

/// What a check found, and mended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Damage that is still there.
    pub corruptions: u64,
    /// Clusters that nothing leads to.
    pub leaks: u64,
    /// Damage that was mended.
    pub corruptions_fixed: u64,
    /// Clusters that were given back.
    pub leaks_fixed: u64,
    /// Places that could not be looked at.
    pub check_errors: u64,
    /// A line for each finding, in QEMU's words; at most some thousands.
    pub messages: Vec<String>,
    /// Numbers that some formats give.
    pub clusters: Option<ClusterCounts>,
    /// Where the last cluster ends, in bytes of the file, where that is told.
    pub image_end_bytes: Option<u64>,
}

/// How the clusters of an image are used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClusterCounts {
    /// All of the disk.
    pub total: u64,
    /// Those that have a place.
    pub allocated: u64,
    /// Those whose place is not behind that of the one before.
    pub fragmented: u64,
    /// Those that are compressed.
    pub compressed: u64,
}

/// As many findings are told one by one.
const MAX_MESSAGES: usize = 10_000;

impl CheckReport {
    /// Counts damage and says what it is.
    pub fn corruption(&mut self, message: impl Into<String>) {
        self.corruptions += 1;
        self.message(message);
    }

    /// Says something.
    pub fn message(&mut self, message: impl Into<String>) {
        if self.messages.len() < MAX_MESSAGES {
            self.messages.push(message.into());
        }
    }
}

//! What a simulation does: the image, the requests, and where the power fails.
//!
//! All of it is plain data: a failure is printed as the data that makes it.

use vellum::Preallocation;

use crate::cut::PowerCut;
pub use crate::space::Place;
use crate::storage::SimFileOptions;

/// A request of the guest. Offsets and lengths are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Writes new bytes.
    Write {
        /// Where.
        offset: u64,
        /// How many.
        len: u64,
        /// Durable at its end.
        fua: bool,
    },
    /// Writes new bytes to whole clusters, compressed where that makes them fewer.
    WriteCompressed {
        /// Where.
        offset: u64,
        /// How many.
        len: u64,
        /// Durable at its end.
        fua: bool,
    },
    /// Writes zeroes.
    WriteZeroes {
        /// Where.
        offset: u64,
        /// How many.
        len: u64,
        /// The space may be given back.
        unmap: bool,
        /// Durable at its end.
        fua: bool,
    },
    /// Gives space back.
    Discard {
        /// Where.
        offset: u64,
        /// How many bytes.
        len: u64,
    },
    /// Reads and compares.
    Read {
        /// Where.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// Makes everything completed durable.
    Flush,
}

impl Op {
    /// Moves the request up.
    pub fn shift(&mut self, by_bytes: u64) {
        match self {
            Op::Write { offset, .. }
            | Op::WriteCompressed { offset, .. }
            | Op::WriteZeroes { offset, .. }
            | Op::Discard { offset, .. }
            | Op::Read { offset, .. } => *offset += by_bytes,
            Op::Flush => {}
        }
    }

    /// The byte range of the request: (offset, length).
    pub fn range(&self) -> (u64, u64) {
        match *self {
            Op::Write { offset, len, .. }
            | Op::WriteCompressed { offset, len, .. }
            | Op::WriteZeroes { offset, len, .. }
            | Op::Discard { offset, len }
            | Op::Read { offset, len } => (offset, len),
            Op::Flush => (0, 0),
        }
    }
}

/// One thing that the guest does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Starts a request, beside those that run already.
    Start(Op),
    /// Waits for all running requests.
    Wait,
    /// Waits, closes the image and opens it again.
    Reopen,
    /// Waits, closes the image, writes what it holds into its backing file, empties it and
    /// opens it again.
    Commit,
    /// Waits, copies what the backing file shows into the image, makes the image stand
    /// alone and opens it again.
    Flatten {
        /// Write the copies compressed.
        compress: bool,
    },
    /// Waits, changes options of the image, and opens it again.
    Amend(Amendment),
    /// Starts changing the size, beside the requests that run.
    Resize {
        /// The new size.
        size_bytes: u64,
        /// How new space is made.
        preallocation: Preallocation,
    },
    /// Changes the snapshots, beside the requests that run.
    Snapshot(Change),
    /// Starts adding a passphrase to an encrypted image and taking it away again, beside
    /// the requests that run.
    ChangeKeys,
    /// Starts to make the file as short as what is allocated, beside the requests that run.
    Compact,
    /// Waits, closes the image, breaks it, repairs it and opens it again.
    Repair(Damage),
    /// Starts changing a bitmap, beside the requests that run.
    Bitmap(BitmapChange),
    /// From now on requests on the disk fail.
    Fail {
        /// Which of them.
        seed: u64,
        /// How often.
        odds: FaultRates,
    },
    /// Sets how many requests run side by side at most.
    InFlight(u64),
    /// From now on the image's file, which must have a quota, may have so many blocks allocated.
    SetQuota {
        /// The number of blocks of 4 KiB.
        blocks: u64,
    },
}

/// How often requests on the disk fail: one in so many, 0 for never.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FaultRates {
    /// Of reads and writes.
    pub requests: u64,
    /// Of flushes.
    pub flushes: u64,
    /// Files do not remember that one has failed: the next says success.
    pub forgets: bool,
}

/// A change of the image's bitmaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BitmapChange {
    /// Nothing is dirty any more.
    Clear,
    /// It records no more.
    Disable,
    /// It records again.
    Enable,
    /// A second one is made and gets what the first one has, or is removed.
    Second,
}

/// How an image is broken that is to be repaired. What the guest and the snapshots
/// see is never touched. Only images of version 3, which can be marked dirty, are
/// broken: the power may fail before the repair has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// Not at all.
    None,
    /// This many clusters that are in use, every so many of them, are counted as free.
    CountsLost(u64),
    /// The refcounts of this many clusters are too high.
    CountsHigh(u64),
    /// This entry of the refcount table is lost.
    BlockLost(u64),
    /// This entry of the refcount table points between clusters.
    BlockUnaligned(u64),
    /// The next entry of the refcount table leads to the first block.
    BlockTwice,
    /// This many copied flags of L2 entries are wrong.
    Flags(u64),
}

/// A change of the snapshots. Those that there are have numbers from 0 on, which begin
/// anew after the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Takes one.
    Take,
    /// Takes one with a VM state of so many bytes.
    TakeWithState(u64),
    /// Applies one, once all running requests have ended.
    Apply(u64),
    /// Deletes one.
    Delete(u64),
}

/// What is changed of an image; what it does not allow changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Amendment {
    /// Format version.
    pub version: Option<u32>,
    /// Logarithm of the refcount width in bits.
    pub refcount_order: Option<u32>,
    /// Whether refcounts may be stale while the image is dirty.
    pub lazy_refcounts: Option<bool>,
    /// The data file, if there is one, gets a name of this length, which only says
    /// how much space the header takes.
    pub data_file_name_len: Option<u64>,
    /// The data file is no raw image any more.
    pub not_raw: bool,
}

/// What stands below the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// Nothing.
    None,
    /// A raw file of this size.
    Raw(u64),
    /// A qcow2 file of this size and cluster size.
    Qcow2 {
        /// Its virtual size in bytes.
        size_bytes: u64,
        /// Logarithm of its cluster size.
        cluster_bits: u32,
    },
}

/// Where the guest's data lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataFile {
    /// In the image.
    Inside,
    /// In an external data file.
    External,
    /// In an external data file that is a raw image too.
    ExternalRaw,
}

/// Where the write log lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WriteLog {
    /// There is none.
    #[default]
    None,
    /// In a file of its own.
    File,
    /// In clusters of the image.
    Inside,
}

/// How the image is made and opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageOptions {
    /// Format version, 2 or 3.
    pub version: u32,
    /// Logarithm of the cluster size.
    pub cluster_bits: u32,
    /// Logarithm of the refcount width in bits.
    pub refcount_order: u32,
    /// Subclusters.
    pub extended_l2: bool,
    /// Refcounts may be stale while the image is dirty.
    pub lazy_refcounts: bool,
    /// Virtual size in bytes.
    pub size_bytes: u64,
    /// What stands below.
    pub backing: Backing,
    /// Where data lies.
    pub data_file: DataFile,
    /// The guest's data is encrypted with LUKS.
    pub encrypted: bool,
    /// The write log that flushes go to.
    pub write_log: WriteLog,
    /// The image's file has checksums, in another file.
    pub checksums: bool,
    /// Small writes may wait in memory for the rest of their cluster.
    pub data_cache: bool,
    /// The smallest caches that can be had, so that tables come and go.
    pub tiny_cache: bool,
    /// Clusters are counted, and the file is made longer, ahead from the first one
    /// on; otherwise only where much is written.
    pub eager: bool,
    /// Discarded clusters stay allocated.
    pub discard_no_unref: bool,
    /// The engine knows requests of plain bytes and nothing else: no other size, no
    /// jobs, nothing compressed.
    pub requests_only: bool,
    /// Logarithm of the granularity of an enabled bitmap, if the image has one.
    pub bitmap_bits: Option<u32>,
    /// What the disk can do.
    pub traits: SimFileOptions,
    /// Where its file lies, and whether the rules of space are checked.
    pub place: Place,
}

impl ImageOptions {
    /// An image that stands alone, with nothing out of the ordinary.
    pub fn plain(size_bytes: u64, cluster_bits: u32) -> ImageOptions {
        ImageOptions {
            version: 3,
            cluster_bits,
            refcount_order: 4,
            extended_l2: false,
            lazy_refcounts: false,
            size_bytes,
            backing: Backing::None,
            data_file: DataFile::Inside,
            encrypted: false,
            write_log: WriteLog::None,
            checksums: false,
            data_cache: true,
            tiny_cache: false,
            eager: true,
            discard_no_unref: false,
            requests_only: false,
            bitmap_bits: None,
            traits: SimFileOptions::default(),
            place: Place::Unchecked,
        }
    }

    /// How many files the image consists of.
    pub fn own_files(&self) -> usize {
        let others = [
            self.data_file != DataFile::Inside,
            self.write_log == WriteLog::File,
            self.checksums,
        ];
        1 + others.into_iter().filter(|is_there| *is_there).count()
    }

    /// Whether the header has room for the name of a file with checksums, which need feature bits and
    /// all of the image in one file.
    pub fn can_have_checksums(&self) -> bool {
        self.version == 3 && self.cluster_bits >= 12 && self.data_file == DataFile::Inside
    }

    /// Whether the header says that there is a backing file: the feature names leave no
    /// space for more in the smallest one.
    pub fn names_backing(&self) -> bool {
        self.backing != Backing::None && !(self.version == 3 && self.cluster_bits == 9)
    }
}

/// A change of the image's bytes that stands in for tools that are not under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preparation {
    /// Compresses up to this many guest clusters that are not allocated.
    Compress(u64),
    /// Turns up to this many allocated clusters into zero clusters that keep
    /// their allocation.
    ZeroFlags(u64),
    /// Makes an internal snapshot: every cluster is shared from then on.
    Snapshot,
    /// Leaves the image dirty, with the refcounts of up to this many data clusters
    /// not written, as an engine with lazy refcounts does when it is killed.
    Dirty(u64),
    /// Makes the file so long that the refcount table can count only this many
    /// clusters beyond its end; it must grow soon.
    FullTable(u64),
}

/// Where the power fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Crash {
    /// Before this many requests on the disk have completed.
    pub step: u64,
    /// The process is killed there instead, and the power fails under the next one.
    pub kill: Option<Kill>,
    /// What survives.
    pub cut: PowerCut,
}

/// A process that is killed while the machine goes on: what it has written stays in the page cache, durable or not, and
/// the next process opens the image over it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kill {
    /// The requests in flight that land, in this order: their places in [`CutPoint::records`](crate::record::CutPoint).
    pub landed: Vec<usize>,
    /// What the next process does with the image before it closes it.
    pub steps: Vec<Step>,
    /// The order in which its requests on the disk complete.
    pub schedule_seed: u64,
    /// Before this many of them have completed the power fails, or once the image is closed.
    pub step: u64,
}

/// The life of the machine from one start to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PowerCycle {
    /// What the guest does.
    pub steps: Vec<Step>,
    /// The order in which requests on the disk complete.
    pub schedule_seed: u64,
    /// How it ends.
    pub crash: Option<Crash>,
}

/// A whole simulation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scenario {
    /// The image.
    pub image: ImageOptions,
    /// Requests, one after the other, before the disk can fail.
    pub setup: Vec<Op>,
    /// Changes of the image after that.
    pub preparations: Vec<Preparation>,
    /// The machine's lives.
    pub cycles: Vec<PowerCycle>,
}

impl Scenario {
    /// The scenario as a Rust test that needs nothing else.
    pub fn to_test(&self, name: &str, message: &str) -> String {
        let data = format!("{self:#?}")
            .replace('[', "vec![")
            // The preparation of that name takes no change.
            .replace(" Snapshot(", " Step::Snapshot(");
        let message = message.replace('\n', "\n/// ");
        format!(
            "/// {message}\n#[test]\nfn {name}() {{\n    use vellum_sim::scenario::{{Backing::*, \
             BitmapChange::*, Change::*, DataFile::*, Op::*, Preparation::*, Step::*, *}};\n    use vellum_sim::{{cut::{{PowerCut, \
             SurvivingPart}}, storage::SimFileOptions}};\n    use vellum::Preallocation::*;\n    let scenario = {};\n    \
             vellum_sim::replay(&vellum_sim::engine(), &scenario).unwrap();\n}}\n",
            data.replace('\n', "\n    ")
                .replace("backing: None", "backing: Backing::None")
                .replace("place: ", "place: Place::")
                .replace("write_log: ", "write_log: WriteLog::")
                .replace("crash: None", "crash: Option::None")
                .replace("kill: None", "kill: Option::None")
                .replace("bitmap_bits: None", "bitmap_bits: Option::None")
        )
    }
}

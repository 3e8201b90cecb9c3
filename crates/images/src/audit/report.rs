//! An audit of an image that nobody vouches for, and what it finds.

use std::future::{Future, poll_fn};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use vellum::luks::CryptMethod;
use vellum::{Buffer, Buffers, Result, Storage};

use super::reference::Reference;
use super::signature::{self, Signature};

/// What is allowed, and how much may be spent to find out.
#[derive(Debug, Clone)]
pub struct Policy {
    /// The format that the image is declared to have; found out if there is none.
    pub format: Option<String>,
    /// The image may name a backing file.
    pub allow_backing: bool,
    /// The image may name an external data file.
    pub allow_data_file: bool,
    /// Names may be protocols (`nbd:...`) and `json:{...}`, which no folder confines.
    pub allow_protocols: bool,
    /// Other files must lie below this folder, with all links followed.
    pub within: Option<PathBuf>,
    /// The largest virtual size that is accepted.
    pub max_size_bytes: Option<u64>,
    /// Memory that the check of the metadata may take.
    pub max_memory_bytes: u64,
    /// Time after which the audit ends, and rejects what it has not seen.
    pub max_time: Duration,
    /// The most rounds of key derivation that one key slot may ask for.
    pub max_iterations: u32,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            format: None,
            allow_backing: false,
            allow_data_file: false,
            allow_protocols: false,
            within: None,
            max_size_bytes: None,
            max_memory_bytes: 1 << 30,
            max_time: Duration::from_secs(60),
            max_iterations: 1 << 25,
        }
    }
}

/// How bad a [`Finding`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Worth knowing.
    Note,
    /// Odd, but no reason by itself to leave the image alone.
    Warning,
    /// The image must not be used under this policy.
    Reject,
}

impl Level {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Level::Note => "note",
            Level::Warning => "warning",
            Level::Reject => "reject",
        }
    }
}

/// One thing that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// A stable name of the kind of finding, for programs: `backing-file`, `polyglot`.
    pub code: &'static str,
    /// What it is, for people.
    pub message: String,
    /// What a caller can allow so that this is no reason any more, where there is such a thing.
    pub permission: Option<Permission>,
}

/// What a [`Policy`] does not allow by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permission {
    /// [`Policy::allow_backing`].
    Backing,
    /// [`Policy::allow_data_file`].
    DataFile,
    /// [`Policy::allow_protocols`].
    Protocols,
    /// Another [`Policy::within`].
    Folder,
    /// A larger [`Policy::max_size_bytes`].
    Size,
    /// A larger [`Policy::max_memory_bytes`].
    Memory,
    /// A longer [`Policy::max_time`].
    Time,
}

/// What a qcow2 image says of itself that a policy may care for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Facts {
    /// Version of the format.
    pub version: u32,
    /// Size of the disk.
    pub virtual_size_bytes: u64,
    /// Bytes of a cluster.
    pub cluster_size_bytes: u64,
    /// Internal snapshots.
    pub snapshots: u64,
    /// Persistent bitmaps.
    pub bitmaps: u64,
    /// How guest data is encrypted.
    pub encryption: Option<&'static str>,
    /// The hash at the top of the seal's tree, in hexadecimal digits, where the image is sealed.
    /// Nothing was compared with it.
    pub seal_content: Option<String>,
    /// The number of the key that the seal says it is signed with. Nobody has checked that.
    pub seal_key: Option<String>,
}

/// What the check of the metadata counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Checked {
    /// Contradictions.
    pub corruptions: u64,
    /// Clusters that are counted and not used.
    pub leaks: u64,
    /// What could not be checked.
    pub errors: u64,
}

/// The outcome.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// The format that the image was audited as.
    pub format: String,
    /// Length of the file.
    pub file_length_bytes: u64,
    /// What the file's bytes look like, wherever programs look.
    pub signatures: Vec<Signature>,
    /// Every other file that the image names.
    pub references: Vec<Reference>,
    /// What was found.
    pub findings: Vec<Finding>,
    /// For qcow2 images whose header can be read.
    pub facts: Option<Facts>,
    /// For images whose metadata was checked to its end.
    pub checked: Option<Checked>,
}

impl Report {
    /// Whether nothing speaks against opening the image.
    pub fn is_safe(&self) -> bool {
        self.findings
            .iter()
            .all(|finding| finding.level < Level::Reject)
    }

    pub(crate) fn add(&mut self, level: Level, code: &'static str, message: impl Into<String>) {
        self.findings.push(Finding {
            level,
            code,
            message: message.into(),
            permission: None,
        });
    }

    /// A reason to reject that a policy can take away.
    pub(crate) fn forbid(
        &mut self,
        code: &'static str,
        message: impl Into<String>,
        with: Permission,
    ) {
        self.reject(code, message);
        if let Some(finding) = self.findings.last_mut() {
            finding.permission = Some(with);
        }
    }

    pub(crate) fn reject(&mut self, code: &'static str, message: impl Into<String>) {
        self.add(Level::Reject, code, message);
    }

    pub(crate) fn warn(&mut self, code: &'static str, message: impl Into<String>) {
        self.add(Level::Warning, code, message);
    }

    pub(crate) fn note(&mut self, code: &'static str, message: impl Into<String>) {
        self.add(Level::Note, code, message);
    }

    /// Says that an image is encrypted, if it is.
    pub(crate) fn note_encryption(&mut self, method: CryptMethod) {
        if method != CryptMethod::None {
            let message = "the guest's data is encrypted: what it is cannot be looked at";
            self.note("encrypted", message);
        }
        if method == CryptMethod::Aes {
            self.warn("weak-encryption", "AES-CBC encryption protects nothing");
        }
    }
}

/// What the parts of an audit share.
pub(crate) struct Audit<'a> {
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) policy: &'a Policy,
    deadline: Option<Instant>,
    pub(crate) report: Report,
}

/// Bytes from the start of the file that are searched for signatures: to the last place
/// of an ISO 9660 descriptor that programs look at, and one sector.
const HEAD_BYTES: u64 = 40 << 10;

const TAIL_BYTES: u64 = 512;

/// Findings of a check that are told one by one.
pub(crate) const MAX_TOLD: usize = 20;

/// Audits the image in `storage`.
///
/// # Errors
/// Only where the storage cannot be read; whatever the bytes are is a finding.
pub async fn audit(storage: Arc<dyn Storage>, policy: &Policy) -> Result<Report> {
    let length = storage.len_bytes()?;
    let head = read(&storage, 0, length.min(HEAD_BYTES)).await?;
    let tail_start = length.saturating_sub(TAIL_BYTES);
    let tail = read(&storage, tail_start, length - tail_start).await?;
    let signatures = signature::find(&head, &tail, tail_start);
    let mut audit = Audit {
        storage,
        policy,
        deadline: Instant::now().checked_add(policy.max_time),
        report: Report {
            file_length_bytes: length,
            signatures,
            ..Report::default()
        },
    };
    let content = signature::leading(&audit.report.signatures);
    audit.name_format(content);
    match content {
        "qcow2" => audit.qcow2().await?,
        "raw" => audit.raw(&head),
        other => audit.foreign(other, &head).await?,
    }
    audit.polyglots(content);
    Ok(audit.report)
}

impl Audit<'_> {
    /// Compares what the file is declared to be with what it looks like.
    fn name_format(&mut self, content: &'static str) {
        let report = &mut self.report;
        report.format = content.to_owned();
        let Some(declared) = &self.policy.format else {
            return;
        };
        report.format.clone_from(declared);
        if declared == content {
            return;
        }
        let message = match declared.as_str() {
            "raw" => format!(
                "declared as raw, but every program that looks at the content takes it for \
                 {content}: a guest can write such a header into its own disk"
            ),
            _ => format!("declared as {declared}, but the content is {content}"),
        };
        report.reject("format-mismatch", message);
    }

    fn raw(&mut self, head: &[u8]) {
        let has_marks_of_disks = !self.report.signatures.is_empty();
        match signature::no_disk(head) {
            Some(what) if !has_marks_of_disks => {
                let message = format!("this is no disk, but {what}");
                self.report.warn("not-a-disk", message);
            }
            None if head.is_empty() => {
                self.report
                    .warn("empty", "the file is empty: a disk without a byte");
            }
            _ => {}
        }
        if self.policy.format.is_none() {
            self.report.note(
                "raw-without-format",
                "open it with its format named (-f raw), never probed: whoever writes its \
                 first sector decides what probing finds",
            );
        }
        self.check_size(self.report.file_length_bytes);
    }

    pub(crate) fn check_size(&mut self, size_bytes: u64) {
        if let Some(most) = self.policy.max_size_bytes
            && size_bytes > most
        {
            let message = format!("the disk has {size_bytes} bytes, and {most} are allowed");
            self.report
                .forbid("virtual-size", message, Permission::Size);
        }
    }

    /// Files that are two formats at once serve to be checked as one and opened as the other.
    fn polyglots(&mut self, content: &'static str) {
        // The bytes of a raw disk are a guest's: partition tables and file systems belong there.
        let others: Vec<String> = self
            .report
            .signatures
            .iter()
            .filter(|other| other.format != content && (content != "raw" || other.is_container))
            .filter(|other| self.is_outside_guest_data(other))
            .map(|other| format!("{} (at offset {:#x})", other.format, other.offset_bytes))
            .collect();
        if !others.is_empty() {
            let message = format!("the {content} file is also {}", others.join(" and "));
            self.report.reject("polyglot", message);
        }
    }

    /// Beyond the first cluster of a qcow2 image a file system's mark may be guest data that
    /// happens to lie there.
    fn is_outside_guest_data(&self, signature: &Signature) -> bool {
        match &self.report.facts {
            Some(facts) if !signature.is_container => {
                signature.offset_bytes < facts.cluster_size_bytes
            }
            _ => true,
        }
    }

    /// Runs work that reads in small pieces, until the time is over.
    pub(crate) async fn in_time<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        poll_fn(|context| match self.is_late() {
            true => Poll::Ready(None),
            false => work.as_mut().poll(context).map(Some),
        })
        .await
    }

    /// Takes down that a check was ended.
    pub(crate) fn is_too_late(&mut self) {
        let seconds = self.policy.max_time.as_secs_f64();
        let message = format!("the check did not end within {seconds} s");
        self.report.forbid("time-limit", message, Permission::Time);
    }

    fn is_late(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| Instant::now() >= deadline)
    }
}

pub(crate) async fn read(
    storage: &Arc<dyn Storage>,
    offset_bytes: u64,
    len_bytes: u64,
) -> Result<Buffer> {
    let buffer = Buffer::for_read(len_bytes as usize);
    storage
        .read(offset_bytes, Buffers::from_buf([buffer]))
        .into_single()
        .await
}

#[cfg(test)]
mod tests;

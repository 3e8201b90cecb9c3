//! `convert --journal`: a copy that goes on after an interruption.
//!
//! The copy is made in pieces (`vellum_jobs::resume`), and a journal beside the target says
//! how far everything is in its place. Whoever comes with the same sources, the same
//! arguments and the same target later goes on from there.
//!
//! Why that is safe, whatever the interruption is (Ctrl-C, `kill -9`, the power):
//! - The journal is replaced as a whole: written under another name, made durable, renamed.
//!   It says no more than what was durable in the target before, as every piece ends with
//!   a flush. (The cache mode `unsafe`, which has no flushes, is refused.)
//! - What lies behind that place is written once more, whatever is there.
//! - The journal of a new target is begun after the target is durable. It says the size of that, which
//!   some formats round up, and a target of another size is refused.
//! - Whatever of this program opens the target to change it ends the journal first, by whatever name it comes
//!   there (`vellum_storage::copy_journal`); a target with several names of its own is refused. Other programs do not know
//!   of that: what was copied is looked at here and there, and a target that is another image by now is refused.
//! - A qcow2 target that was not closed may have clusters that are counted and not used.
//!   They are given back first, and a target with any contradiction is refused.
//! - The journal is locked as long as the copy runs, so that nobody else goes on with it,
//!   and whoever changes the target holds its locks as for any image.
//! - Sources are known by place, length and time of change of every file of their chains.
//!   What has no such time (a block device) is refused.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use serde_json::{Value, json};
use vellum::qcow2::check::{CheckOptions, Fix, repair};
use vellum::qcow2::read_header;
use vellum::{BlockDevice, Error, Storage};
use vellum_control::layer_files::layer_files;
use vellum_control::{CacheMode, filename};
use vellum_format::features::Incompatible;
use vellum_io::error::io_text;
use vellum_jobs::copy::{CopyOptions, Observer};
use vellum_jobs::resume::{PieceError, copy_in_pieces, is_in_place};
use vellum_storage::{FileOptions, FileStorage};

use super::check::{CHECKSUMS_GIVEN_UP, has_checksums};
use super::command::{Command, Failure, Outcome, cache_mode, fail, open_failure};
use super::convert::{copy_failure, copy_options, make_target, open_target, target_settings};
use super::convert_args::Arguments;
use super::file_version::FileVersion;
use super::note::{Note, claim_journal};
use super::unfinished::Unfinished;
use crate::progress::Progress;
use crate::size::human;
use crate::{hint, report};

/// Bytes of the disk between two entries of the journal; whole clusters of any size.
const PIECE_BYTES: u64 = 256 << 20;
const VERSION: u64 = 1;
const SECTOR_BYTES: u64 = 512;

/// Copies the sources, from where an earlier copy has ended.
pub async fn convert(
    command: Command<'_>,
    arguments: &Arguments,
    format: &str,
    target_name: &str,
    sources: &[Arc<dyn BlockDevice>],
    unfinished: &Unfinished,
) -> Outcome {
    check(arguments)?;
    let cache = match &arguments.target_cache {
        Some(name) => cache_mode("cache", name)?,
        None => CacheMode::default(),
    };
    if cache == CacheMode::UNSAFE {
        return fail("--journal needs a target that can be flushed, not -t unsafe");
    }
    let identity = identity(arguments, format, sources)?;
    let journal = Journal::claim(target_name)?;
    let (start_bytes, size_bytes) = match journal.read()? {
        Some(entry) => {
            let start_bytes = entry.place(&identity, target_name, &journal)?;
            if format == "qcow2" {
                give_back_leaks(&journal.target).await?;
            }
            report::info(format_args!("going on at {}", human(start_bytes)));
            (start_bytes, entry.size_bytes)
        }
        None => {
            let begun = begin(arguments, format, target_name, sources, &journal, &identity).await;
            if begun.is_err() {
                // The first error is the one to tell.
                let _ = journal.remove();
            }
            begun?;
            (0, None)
        }
    };
    let target = open_target(arguments, format, target_name, cache).await?;
    unfinished.is_gone_on_with();
    let source_bytes: u64 = sources.iter().map(|source| source.size_bytes()).sum();
    let total_bytes = source_bytes.next_multiple_of(SECTOR_BYTES);
    let target_bytes = target.size_bytes();
    journal.check_size(target_name, target_bytes, size_bytes, total_bytes)?;
    if !is_in_place(sources, &target, start_bytes).await? {
        return fail(format!(
            "'{target_name}' has not what '{}' says was copied: it was written to since; remove that to \
             begin anew",
            journal.path().display()
        ));
    }
    let options = CopyOptions {
        start_bytes,
        len_bytes: Some(total_bytes),
        ..copy_options(arguments, &target, false)
    };
    let mut progress = Progress::new(command.program, arguments.progress, arguments.quiet, 1.0);
    let done = |done_bytes| {
        journal.write(&identity, done_bytes, Some(target_bytes))?;
        progress.show(done_bytes, total_bytes);
        Ok(())
    };
    let mut warnings = Warnings {
        quiet: arguments.quiet,
    };
    let copied = copy_in_pieces(sources, &target, &options, PIECE_BYTES, &mut warnings, done).await;
    progress.end();
    copied.map_err(|error| failure(error, target_name, total_bytes))?;
    target.close().await?;
    journal.remove()?;
    unfinished.is_done();
    Ok(0)
}

fn failure(error: PieceError<Failure>, target_name: &str, total_bytes: u64) -> Failure {
    match error {
        PieceError::Copy(error) => {
            let left_bytes = total_bytes.saturating_sub(error.offset_bytes);
            hint::about_space(target_name, &error.cause, Some(left_bytes));
            copy_failure(error)
        }
        PieceError::Flush(error) => Failure::from(error),
        PieceError::Told(failure) => failure,
    }
}

/// Makes a new target, and a journal that speaks of it.
async fn begin(
    arguments: &Arguments,
    format: &str,
    target_name: &str,
    sources: &[Arc<dyn BlockDevice>],
    journal: &Journal,
    identity: &Value,
) -> Result<(), Failure> {
    let settings = target_settings(arguments, format, target_name, sources)?;
    if settings.text("backing_file").is_some() {
        return fail("--journal is not possible with a backing file");
    }
    make_target(target_name, format, &settings).await?;
    journal.begin(identity)
}

fn check(arguments: &Arguments) -> Result<(), Failure> {
    let refusals = [
        (arguments.no_create, "-n"),
        (arguments.target_image_opts, "--target-image-opts"),
        (arguments.out_of_order, "-W"),
        (arguments.bitmaps, "--bitmaps"),
        (arguments.salvage, "--salvage"),
        (arguments.source_image_opts, "--image-opts"),
        (arguments.backing.is_some(), "-B"),
    ];
    match refusals.into_iter().find(|(is_set, _)| *is_set) {
        Some((_, option)) => fail(format!("--journal is not possible with {option}")),
        None => Ok(()),
    }
}

/// Everything that decides what the target becomes.
fn identity(
    arguments: &Arguments,
    format: &str,
    sources: &[Arc<dyn BlockDevice>],
) -> Result<Value, Failure> {
    let mut files = Vec::new();
    for source in sources {
        let mut next = Some(source.clone());
        while let Some(device) = next {
            let info = device.info();
            let mut names: Vec<String> = layer_files(&*device)
                .iter()
                .map(|storage| storage.name().to_owned())
                .collect();
            if names.is_empty() {
                names.push(info.name);
            }
            let known: Result<Vec<_>, _> = names.iter().map(|name| source_identity(name)).collect();
            files.push(json!({
                "format": info.format,
                "virtual-size": device.size_bytes(),
                "files": known?,
            }));
            next = device.backing();
        }
    }
    Ok(json!({
        "sources": files,
        "count": sources.len(),
        "snapshot": arguments.source_snapshot,
        "format": format,
        "options": arguments.target_options,
        "compress": arguments.compress,
        "compression": format!("{:?}", arguments.compression),
        "sparse": arguments.sparse_bytes,
    }))
}

/// A file that is the same and has not been changed.
fn source_identity(name: &str) -> Result<Value, Failure> {
    let file = std::fs::metadata(name).map_err(|error| {
        Failure::Message(format!("Cannot look at '{name}': {}", io_text(&error)))
    })?;
    match FileVersion::of(&file) {
        Some(version) => Ok(version.all()),
        None => fail(format!(
            "--journal needs sources that are files: of '{name}' nobody knows when it was changed"
        )),
    }
}

/// Which file the target is, whatever it holds. Where another file has its number by now, it was made at another time.
fn target_identity(path: &str) -> Option<Value> {
    let file = std::fs::metadata(path).ok()?;
    let made = file.created().ok();
    let made = made.and_then(|made| made.duration_since(SystemTime::UNIX_EPOCH).ok());
    let made = made.map(|made| json!([made.as_secs(), made.subsec_nanos()]));
    FileVersion::of(&file).map(|version| json!([version.file(), made]))
}

/// Refuses a target that has another name: nobody who opens it by that can know of the journal.
fn refuse_other_names(target_name: &str, target: &str) -> Result<(), Failure> {
    match std::fs::metadata(target) {
        Ok(file) if file.is_file() && file.nlink() > 1 => fail(format!(
            "--journal needs a target with one name, and the file '{target_name}' has {}",
            file.nlink()
        )),
        _ => Ok(()),
    }
}

/// Gives back what an image that was not closed holds without use.
pub(super) async fn give_back_leaks(name: &str) -> Result<(), Failure> {
    // With the locks of a writer: whoever else has the target open is in the way.
    let opened = FileStorage::open_patiently(name, &FileOptions::default()).await;
    let storage: Arc<dyn Storage> = opened.map_err(|error| open_failure(name, &error))?;
    let header = read_header(&storage).await?;
    // Refcounts that may be late are made anew, as by whoever opens such an image.
    let fix = match header.incompatible.contains(Incompatible::DIRTY) {
        true => Fix::All,
        false => Fix::Leaks,
    };
    let had_checksums = has_checksums(&storage).await;
    let report = repair(storage, fix, &CheckOptions::default()).await?;
    if had_checksums {
        report::eprint_line(CHECKSUMS_GIVEN_UP);
    }
    match report.corruptions + report.check_errors {
        0 => Ok(()),
        count => fail(format!(
            "'{name}' has {count} contradictions in its metadata: it was not only interrupted"
        )),
    }
}

/// The file that tells how far a copy is. It is locked by the one who makes the copy.
struct Journal {
    note: Note,
    /// The file that it speaks of.
    target: String,
}

/// What it says.
struct Entry {
    identity: Value,
    target: Value,
    done_bytes: u64,
    /// Of the target; nobody has looked yet where nothing is said.
    size_bytes: Option<u64>,
}

impl Journal {
    /// Takes the journal of a target, new and empty if there is none.
    fn claim(target_name: &str) -> Result<Journal, Failure> {
        let local = filename::local_path(target_name);
        let target = local.unwrap_or_else(|_| target_name.to_owned());
        refuse_other_names(target_name, &target)?;
        let note = claim_journal(target_name, Path::new(&target))?;
        Ok(Journal { note, target })
    }

    fn path(&self) -> &Path {
        self.note.path()
    }

    /// What it says; an empty one, nothing.
    fn read(&self) -> Result<Option<Entry>, Failure> {
        let text = self.note.text()?;
        if text.is_empty() {
            return Ok(None);
        }
        let value: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
        match value["done"].as_u64() {
            Some(done_bytes) if value["version"] == VERSION => Ok(Some(Entry {
                identity: value["copy"].clone(),
                target: value["target"].clone(),
                done_bytes,
                size_bytes: value["size"].as_u64(),
            })),
            _ => fail(format!(
                "'{}' is no journal of a copy; remove it to begin anew",
                self.path().display()
            )),
        }
    }

    /// Speaks of a new target, once that is there durably.
    fn begin(&self, identity: &Value) -> Result<(), Failure> {
        // Without locks: nothing is read or changed.
        let durable = File::open(&self.target).and_then(|file| file.sync_all());
        durable
            .and_then(|()| self.note.sync_folder())
            .or_else(|error| self.note.fail("begin", &error))?;
        self.write(identity, 0, None)
    }

    /// Says that everything up to `done_bytes` is in its place, durably, and how large the target is.
    fn write(
        &self,
        identity: &Value,
        done_bytes: u64,
        size_bytes: Option<u64>,
    ) -> Result<(), Failure> {
        let value = json!({
            "version": VERSION,
            "copy": identity,
            "target": target_identity(&self.target),
            "done": done_bytes,
            "size": size_bytes,
        });
        self.note.replace(&value.to_string())
    }

    /// A target of another size than before has lost what the journal says is there.
    fn check_size(
        &self,
        target: &str,
        found_bytes: u64,
        before_bytes: Option<u64>,
        needed_bytes: u64,
    ) -> Result<(), Failure> {
        match before_bytes {
            Some(before_bytes) if found_bytes != before_bytes => fail(format!(
                "'{target}' has not the size that '{}' speaks of; remove that to begin anew",
                self.path().display()
            )),
            _ if found_bytes < needed_bytes => fail("output file is smaller than input file"),
            _ => Ok(()),
        }
    }

    fn remove(&self) -> Result<(), Failure> {
        self.note.remove()
    }
}

impl Entry {
    /// Where to go on, if this is the journal of the same copy.
    fn place(&self, identity: &Value, target: &str, journal: &Journal) -> Result<u64, Failure> {
        let path = journal.path().display();
        if self.identity != *identity {
            return fail(format!(
                "The sources or the arguments are not those of the copy that '{path}' speaks of; \
                 remove it to begin anew"
            ));
        }
        match target_identity(&journal.target) {
            Some(found) if found == self.target => Ok(self.done_bytes),
            _ => fail(format!(
                "'{target}' is not the file that '{path}' speaks of; remove that to begin anew"
            )),
        }
    }
}

/// Tells what could not be read.
struct Warnings {
    quiet: bool,
}

impl Observer for Warnings {
    fn unknown(&mut self, source_offset_bytes: u64, error: &Error) {
        if !self.quiet {
            let why = report::error_text(error);
            report::warning(format_args!(
                "error while reading block status at offset {source_offset_bytes}: {why}"
            ));
        }
    }

    fn unreadable(&mut self, offset_bytes: u64, error: &Error) {
        if !self.quiet {
            let why = report::error_text(error);
            report::warning(format_args!(
                "error while reading offset {offset_bytes}: {why}"
            ));
        }
    }
}
